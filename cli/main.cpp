#include <exception>
#include <iostream>
#include <stdexcept>

#include "application.h"
#include "commands/commands.h"
#include "support/interrupt.h"

namespace {

using headroom::cli::GlobalOptions;

// Without what training needs the command still exists, and says so.
#ifdef HEADROOM_HAS_TRAIN
void add_train(CLI::App& app, const GlobalOptions& globals) {
  headroom::cli::add_train_command(app, globals);
}
#else
void add_train(CLI::App& app, const GlobalOptions&) {
  CLI::App* command = app.add_subcommand("train", "Train a small language model (not in this build)");
  command->allow_extras();
  command->callback([] { throw std::runtime_error("train is not in this build, which has no OpenMP"); });
}
#endif

constexpr headroom::cli::AddCommand kCommands[] = {
    headroom::cli::add_info_command,  headroom::cli::add_plan_command,  headroom::cli::add_loss_command,
    headroom::cli::add_check_command, headroom::cli::add_bench_command, add_train,
};

}  // namespace

int main(int argc, char** argv) {
  headroom::cli::watch_for_interrupts();
  try {
    return headroom::cli::run_application(argc, argv, kCommands);
  } catch (const std::exception& error) {
    std::cerr << "headroom: error: " << error.what() << "\n";
    return 1;
  }
}
