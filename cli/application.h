#pragma once
#include <CLI/CLI.hpp>
#include <span>
#include <stdexcept>
#include <string>

namespace logitless::cli {

// Options before the subcommand, which hold for every subcommand.
struct GlobalOptions {
  bool json = false;    // one JSON document on stdout instead of text
  bool quiet = false;   // no progress on stderr
  int threads = 0;      // 0: all processors that this process may use
  std::string backend;  // empty: the best that is usable
};

// Wrong usage, exit code 2: the command's words cannot be right. Every other exception is a failure, exit
// code 1.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Functions that each add a subcommand. Its callback does the work and throws on failure.
using AddCommand = void (*)(CLI::App& app, const GlobalOptions& globals);
void add_info_command(CLI::App& app, const GlobalOptions& globals);
void add_plan_command(CLI::App& app, const GlobalOptions& globals);
void add_loss_command(CLI::App& app, const GlobalOptions& globals);
void add_check_command(CLI::App& app, const GlobalOptions& globals);
void add_bench_command(CLI::App& app, const GlobalOptions& globals);
void add_tune_command(CLI::App& app, const GlobalOptions& globals);

// Parses the arguments, the program's name first, and runs the named subcommand. Results go to std::cout,
// errors to std::cerr. Returns the exit code.
int run_application(int argc, const char* const* argv, std::span<const AddCommand> commands);

}  // namespace logitless::cli
