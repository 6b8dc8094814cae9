#pragma once
#include <CLI/CLI.hpp>
#include <logitless/logitless.hpp>
#include <string>

#include "commands/context.h"
#include "options.h"

namespace logitless::cli {

// --device of a command.
void add_device_option(CLI::App& command, std::string& text, const std::string& help);

// Of "cpu" or "cuda:N". Throws UsageError for anything else, and for a --backend that works elsewhere;
// std::runtime_error when there is no such device or it is not usable.
DeviceChoice parse_device(const GlobalOptions& globals, const std::string& text);

// The same for plans, which a model of device is enough for: "h200".
DeviceChoice parse_device_or_model(const GlobalOptions& globals, const std::string& text);

}  // namespace logitless::cli
