#include "application.h"

#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "commands/options.h"

namespace logitless::cli {
namespace {

constexpr int kFailure = 1;
constexpr int kUsage = 2;

constexpr const char* kDescription =
    "Logitless computes the loss of a language model's head, and its gradients, without holding the logits.\n"
    "\n"
    "  logits = hidden [tokens, D] x weight [vocab, D]^T; the loss is their softmax cross entropy.\n"
    "  It holds a workspace of a size that you set, never the tokens x vocab matrix.";

constexpr const char* kFooter =
    "\nExamples:\n"
    "  logitless info                                     this machine, its backends and devices\n"
    "  logitless plan --model gemma-2-2b --tokens 8192 --budget 256MiB\n"
    "  logitless loss --hidden h.npy --weight model.safetensors:lm_head.weight --targets y.npy\n"
    "  logitless check                                    compare this machine's results with float64\n"
    "  logitless bench --shape 1024,32768,512             compare time and memory with materialized logits\n"
    "  logitless tune                                     measure a GPU, which then uses its fastest "
    "kernels\n"
    "  logitless COMMAND --help                           all options of a command, with examples\n"
    "\n"
    "Results go to stdout, progress and errors to stderr.\n"
    "Exit codes: 0 success, 1 failure (unreadable input, failed check), 2 wrong usage, 130 interrupted.";

// Refuses empty values: a script that passes a variable that is not set never means one.
void refuse_empty_values(CLI::App& app) {
  const CLI::Validator filled(
      [](const std::string& text) { return std::string(text.empty() ? "expected a value, got ''" : ""); },
      "");
  for (CLI::Option* option : app.get_options()) option->transform(filled);  // before all other checks
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    refuse_empty_values(*command);
  }
}

int fail(const std::string& message, int code) {
  std::cerr << "logitless: error: " << message << "\n";
  return code;
}

int fail_usage(const CLI::App& app, const CLI::ParseError& error) {
  std::string command = "logitless";
  for (const CLI::App* chosen : app.get_subcommands()) command += " " + chosen->get_name();
  std::string message = error.what();
  const std::vector<std::string> unknown = app.remaining();
  if (app.get_subcommands().empty()) {
    message = unknown.empty() ? "no command" : "no command '" + unknown.front() + "'";
    if (!unknown.empty() && unknown.front().starts_with('-')) message = "no option " + unknown.front();
    message += "; commands:";
    for (const CLI::App* known : app.get_subcommands([](const CLI::App*) { return true; })) {
      message += " " + known->get_name();
    }
  }
  return fail(message + "\nSee '" + command + " --help'.", kUsage);
}

// Reports a library error under the option's name on the command line. A value that no plan has is wrong
// usage.
int fail_library(const CLI::App& app, const Error& error) {
  const std::string flag = error.argument == "max_workspace_bytes" ? "--budget" : flag_of(error.argument);
  std::vector<const CLI::App*> typed{&app};
  for (const CLI::App* chosen : app.get_subcommands()) typed.push_back(chosen);
  for (const CLI::App* part : typed) {
    if (part->get_option_no_throw(flag) == nullptr) continue;
    const bool is_usage = error.status() == LOGITLESS_INVALID_ARGUMENT || flag == "--backend";
    return fail(flag + ": expected " + error.expected + ", got " + error.got, is_usage ? kUsage : kFailure);
  }
  return fail(error.what(), kFailure);
}

}  // namespace

int run_application(int argc, const char* const* argv, std::span<const AddCommand> commands) {
  CLI::App app(kDescription, "logitless");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("logitless ") + logitless_version());
  app.require_subcommand(1);
  app.fallthrough();  // global options may also stand behind the subcommand

  GlobalOptions globals;
  app.add_flag("--json", globals.json, "Print the result as one JSON document");
  app.add_flag("--quiet,-q", globals.quiet, "Show no progress on stderr");
  app.add_option("--threads", globals.threads, "Number of threads; 0: all processors")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option(
      "--backend", globals.backend,
      "Backend, with or without its engine, as NAME[:ENGINE]; see 'logitless info'. Default: the best");

  for (const AddCommand add : commands) add(app, globals);
  refuse_empty_values(app);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return fail_usage(app, error);
  } catch (const UsageError& error) {
    return fail(error.what(), kUsage);
  } catch (const std::bad_alloc&) {
    return fail("out of memory", kFailure);
  } catch (const Error& error) {
    return fail_library(app, error);
  } catch (const std::exception& error) {
    return fail(error.what(), kFailure);
  }
  std::cout.flush();
  if (!std::cout) return fail("stdout: cannot be written", kFailure);
  return 0;
}

}  // namespace logitless::cli
