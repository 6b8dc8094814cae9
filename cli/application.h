#pragma once
#include <CLI/CLI.hpp>
#include <span>

#include "options.h"

namespace logitless::cli {

// Adds a subcommand, whose callback does the work and throws on failure.
using AddCommand = void (*)(CLI::App& app, const GlobalOptions& globals);

// Parses the arguments, the program's name first, and runs the subcommand that they name. Results go to
// std::cout, errors to std::cerr. Returns the exit code.
int run_application(int argc, const char* const* argv, std::span<const AddCommand> commands);

}  // namespace logitless::cli
