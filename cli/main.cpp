#include <csignal>
#include <exception>
#include <iostream>

#include "application.h"

namespace {

using logitless::cli::GlobalOptions;

// The Python package's `logitless` runs this one command itself, and this program for all others.
void add_model(CLI::App& app, const GlobalOptions&) {
  CLI::App* command = app.add_subcommand("model", "Show the cost of a training step (Python package only)");
  command->prefix_command()->fallthrough(false);
  command->set_help_flag();
  command->callback([] {
    throw logitless::cli::UsageError(
        "model: expected the Python package's logitless, got the program without it; pip install it, or run "
        "python -m logitless.cost_model with its folder python/ in PYTHONPATH");
  });
}

constexpr logitless::cli::AddCommand kCommands[] = {
    logitless::cli::add_info_command,
    logitless::cli::add_plan_command,
    logitless::cli::add_loss_command,
    logitless::cli::add_check_command,
    logitless::cli::add_bench_command,
    logitless::cli::add_tune_command,
    add_model,
};

}  // namespace

int main(int argc, char** argv) {
  // A file beyond the process's limit (ulimit -f) makes the write fail; without this line a signal would end
  // us.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return logitless::cli::run_application(argc, argv, kCommands);
  } catch (const std::exception& error) {
    std::cerr << "logitless: error: " << error.what() << "\n";
    return 1;
  }
}
