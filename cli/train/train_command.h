#pragma once

#include <CLI/CLI.hpp>

#include "options.h"

namespace headroom::cli {

// headroom train: see its --help.
void add_train_command(CLI::App& app, const GlobalOptions& global);

}  // namespace headroom::cli
