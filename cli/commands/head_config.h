#pragma once
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "commands/loss_options.h"
#include "io/model_config.h"

namespace logitless::cli {

// The config.json of a model, of which --scale and --softcap of the command take their part when given.
// Throws FileError.
ModelConfig read_head_config(const std::string& file, const CLI::App& command);

// What the config says in the place of --scale and --softcap that were not given.
void apply(const ModelConfig& config, const CLI::App& command, LossOptions& options);

// What was applied: {"file": ..., "applied": [{"option": ..., "key": ..., "value": ...}]}, and for people,
// such as "softcap 30 (final_logit_softcapping 30 in config.json)", empty where nothing was.
nlohmann::ordered_json applied_json(const ModelConfig& config);
std::string applied_text(const ModelConfig& config);

}  // namespace logitless::cli
