#include "commands/plan.h"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <vector>

#include "io/model_config.h"
#include "io/tensor.h"
#include "models.h"
#include "support/format.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

constexpr const char* kDefaultDtype = "bf16";

// The config.json that --model names, itself or by its folder; empty where it is a name.
std::string find_config(const std::string& model) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_regular_file(model, error)) return model;
  const fs::path file = fs::path(model) / "config.json";
  return fs::exists(file, error) ? file.string() : "";
}

void require_size(const std::string& file, const char* key, const std::string& size, const char* option,
                  const std::string& given) {
  if (size.empty() && given.empty()) {
    throw FileError(file, std::string("has no '") + key + "'; give " + option);
  }
}

void add_to(std::string& list, const std::string& text) {
  if (!text.empty()) list += (list.empty() ? "" : ", ") + text;
}

// What the config says in the place of --dtype.
void take_dtype(const ModelConfig& config, PlanOptions& options, PlanModel& model) {
  if (config.dtype_key.empty()) return;
  try {
    options.dtype = dtype_text(parse_dtype("--dtype", config.dtype));
  } catch (const UsageError&) {
    throw FileError(config.file, "'" + config.dtype_key +
                                     "': expected float32, bfloat16, float16 or float64, got '" +
                                     config.dtype + "'; --dtype, given, takes its place");
  }
  add_to(model.taken, "dtype " + options.dtype + " (" + config.dtype_key + " " + config.dtype + " in " +
                          config.file + ")");
  model.facts["applied"].push_back({{"option", "dtype"}, {"key", config.dtype_key}, {"value", config.dtype}});
}

// Such as "softcap 30 (final_logit_softcapping 30 in config.json)".
void take_transform(const std::string& option, double value, const std::vector<LogitTransform>& from,
                    const std::string& file, PlanModel& model) {
  std::string keys;
  for (const LogitTransform& transform : from) {
    add_to(keys, transform.key + " " + format_number(transform.value));
    model.facts["applied"].push_back(
        {{"option", option}, {"key", transform.key}, {"value", transform.value}});
  }
  if (!keys.empty())
    add_to(model.taken, option + " " + format_number(value) + " (" + keys + " in " + file + ")");
}

PlanModel read_config(const std::string& file, PlanOptions& options, const CLI::App& command,
                      std::string& vocab, std::string& hidden) {
  const bool has_scale = command.count("--scale") != 0, has_softcap = command.count("--softcap") != 0;
  const ModelConfig config = read_model_config(file, {.scale = has_scale, .softcap = has_softcap});
  if (!has_scale) options.loss.scale = config.scale;
  if (!has_softcap) options.loss.softcap = config.softcap;
  if (config.vocab) vocab = std::to_string(*config.vocab);
  if (config.hidden) hidden = std::to_string(*config.hidden);
  require_size(file, "vocab_size", vocab, "--vocab", options.vocab);
  require_size(file, "hidden_size", hidden, "--hidden", options.hidden);
  PlanModel model{options.model, "", {{"file", config.file}, {"applied", ordered_json::array()}}};
  if (options.dtype.empty()) take_dtype(config, options, model);
  take_transform("scale", config.scale, config.scale_from, config.file, model);
  take_transform("softcap", config.softcap, config.softcap_from, config.file, model);
  return model;
}

PlanModel read_known(PlanOptions& options, const CLI::App& command, std::string& vocab, std::string& hidden) {
  const ModelHead& known = find_model(options.model);
  vocab = std::to_string(known.vocab);
  hidden = std::to_string(known.hidden);
  PlanModel model{std::string(known.name),
                  "",
                  {{"name", known.name}, {"weights", known.weights}, {"source", known.source}}};
  ordered_json applied = ordered_json::array();
  const auto take = [&](const char* option, double value, double neutral, double& to) {
    if (command.count(std::string("--") + option) != 0) return;
    to = value;
    if (value == neutral) return;
    add_to(model.taken, option + (" " + format_number(value)) + " (of " + model.name + ")");
    applied.push_back({{"option", option}, {"key", option}, {"value", value}});
  };
  take("scale", known.scale, 1, options.loss.scale);
  take("softcap", known.softcap, 0, options.loss.softcap);
  model.facts["applied"] = applied;
  return model;
}

}  // namespace

PlanModel read_plan_model(PlanOptions& options, const CLI::App& command) {
  PlanModel model;
  if (!options.model.empty()) {
    std::string vocab, hidden;
    const std::string file = find_config(options.model);
    model = file.empty() ? read_known(options, command, vocab, hidden)
                         : read_config(file, options, command, vocab, hidden);
    if (options.vocab.empty()) options.vocab = vocab;
    if (options.hidden.empty()) options.hidden = hidden;
  }
  if (options.dtype.empty()) {
    options.dtype = kDefaultDtype;
    add_to(model.taken, "dtype " + options.dtype + " (the default)");
  }
  return model;
}

void list_models(bool json) {
  ordered_json list = ordered_json::array();
  std::vector<std::string_view> sources;  // each once, cited by number in the text
  Table table({"model", "vocab", "hidden", "softcap", "scale", "weights", "source"});
  for (const ModelHead& model : known_models()) {
    list.push_back({{"name", model.name},
                    {"vocab", model.vocab},
                    {"hidden", model.hidden},
                    {"softcap", model.softcap},
                    {"scale", model.scale},
                    {"weights", model.weights},
                    {"source", model.source}});
    const auto place = std::find(sources.begin(), sources.end(), model.source) - sources.begin();
    if (place == static_cast<ptrdiff_t>(sources.size())) sources.push_back(model.source);
    table.add({std::string(model.name), format_count(model.vocab), format_count(model.hidden),
               model.softcap == 0 ? "-" : format_number(model.softcap), format_number(model.scale),
               std::string(model.weights), "[" + std::to_string(place + 1) + "]"});
  }
  if (json) return print_json(list);
  std::cout << table.text() << "\nSources of the numbers:\n";
  for (size_t i = 0; i < sources.size(); ++i) std::cout << "[" << i + 1 << "] " << sources[i] << "\n";
}

}  // namespace logitless::cli
