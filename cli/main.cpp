#include <exception>
#include <iostream>
#include <stdexcept>

#include "application.h"
#include "commands/commands.h"
#include "io/mapped_file.h"
#include "support/interrupt.h"

namespace {

using logitless::cli::GlobalOptions;

// Without what training needs the command still exists, and says so.
#ifdef LOGITLESS_HAS_TRAIN
void add_train(CLI::App& app, const GlobalOptions& globals) {
  logitless::cli::add_train_command(app, globals);
}
#else
void add_train(CLI::App& app, const GlobalOptions&) {
  CLI::App* command = app.add_subcommand("train", "Train a small language model (not in this build)");
  command->allow_extras();
  command->callback([] { throw std::runtime_error("train is not in this build, which has no OpenMP"); });
}
#endif

// The package's own `logitless` runs this one command itself, and this program for all others.
void add_model(CLI::App& app, const GlobalOptions&) {
  CLI::App* command = app.add_subcommand("model", "The cost of a training step (Python package only)");
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
    add_train,
    add_model,
};

}  // namespace

int main(int argc, char** argv) {
  logitless::cli::watch_for_interrupts(logitless::cli::mapped_file_at);
  try {
    return logitless::cli::run_application(argc, argv, kCommands);
  } catch (const std::exception& error) {
    std::cerr << "logitless: error: " << error.what() << "\n";
    return 1;
  }
}
