#pragma once
#include <CLI/CLI.hpp>

#include "options.h"

namespace logitless::cli {

// Each adds its subcommand, whose callback does the work and throws on failure.
void add_info_command(CLI::App& app, const GlobalOptions& globals);
void add_plan_command(CLI::App& app, const GlobalOptions& globals);
void add_loss_command(CLI::App& app, const GlobalOptions& globals);
void add_check_command(CLI::App& app, const GlobalOptions& globals);
void add_bench_command(CLI::App& app, const GlobalOptions& globals);

}  // namespace logitless::cli
