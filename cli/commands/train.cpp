#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "commands/context.h"
#include "commands/thinning_options.h"
#include "commands/train_device.h"
#include "commands/units.h"
#include "io/atomic_file.h"
#include "support/format.h"
#include "support/interrupt.h"
#include "train/demonstration.h"
#include "train/report.h"

namespace logitless::cli {
namespace {

constexpr const char* kDescription =
    "Train a small language model on this machine, the fused head beside the materialized one";

constexpr const char* kFooter =
    "\nThe model: embedding, gated linear recurrences with RMS norm and residual, and a head of its own. It\n"
    "learns its vocabulary (byte-level BPE) from the text, trains a few steps with the N x V logits in "
    "memory\n"
    "(the materialized head), starts again from the same parameters with the fused head, checks that both\n"
    "give the same losses and gradients, and goes on with the fused head alone. On a GPU all of it runs "
    "there.\n"
    "\nWritten into the output folder:\n"
    "  model.safetensors  the model; also hidden and targets of a validation batch, for 'logitless loss'\n"
    "  tokenizer.json     the vocabulary, in the format of the Hugging Face tokenizers library\n"
    "  figures.json       all figures, as --json prints them\n"
    "  loss.svg, memory.svg, agreement.svg\n"
    "\n"
    "Ctrl-C ends training after the step at hand and writes everything (exit code 130); a second Ctrl-C\n"
    "quits at once.\n"
    "With --steps the result depends on the seed, the text, the device and the number of threads alone; "
    "with\n"
    "--minutes the number of steps is set from the speed of the first ones, and printed.\n"
    "Exit code 1 if the two heads do not agree.\n"
    "\n"
    "Examples:\n"
    "  logitless train                                    about three minutes on two cores, one with a GPU\n"
    "  logitless train --device cpu                       not on a GPU, also where there is one\n"
    "  logitless train --minutes 10 ~/books src/          text from a folder and another\n"
    "  logitless train --gradient thinned --threshold 2^-9\n"
    "  logitless train --steps 200 --compare-steps 0 --batch 4 --vocab 8192 notes.txt";

struct Options {
  train::Settings settings;
  ThinningOptions thinning;
  std::vector<std::string> paths;
  std::string budget = "64MiB";
  std::string most_text = "32MiB";
  std::string output = "logitless-train";
  std::string device = "auto";
};

// More would go over the same text again and again.
constexpr double kMinutesOnGpu = 0.5;

void add_options(CLI::App& command, Options& options) {
  train::Settings& s = options.settings;
  command.add_option(
      "text", options.paths,
      "Files and folders of text. Default: the sources of Python's standard library, else the C "
      "and C++ headers in /usr/include");
  command.add_option("--output,-o", options.output, "Folder for all results")->capture_default_str();
  command
      .add_option(
          "--device", options.device,
          "Where all of it runs: cpu, cuda:N, cuda, the first GPU that is usable, or auto, which is that "
          "one or else the CPU")
      ->capture_default_str();

  const std::string length = "How long";
  auto* minutes = command
                      .add_option("--minutes", s.minutes,
                                  "Minutes of training with the fused head; on a GPU 0.5 unless given")
                      ->check(CLI::Range(0.01, 1e5))
                      ->capture_default_str()
                      ->group(length);
  command.add_option("--steps", s.steps, "Steps to train, instead of --minutes")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->excludes(minutes)
      ->group(length);
  command
      .add_option("--compare-steps", s.compare_steps, "First steps, trained with both heads; 0: fused only")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str()
      ->group(length);

  const std::string data = "Data";
  command.add_option("--vocab", s.vocab, "Vocabulary entries")
      ->check(CLI::Range(258, 1 << 24))
      ->capture_default_str()
      ->group(data);
  command.add_option("--max-text", options.most_text, "Text read at the most, such as 32MiB")
      ->capture_default_str()
      ->group(data);
  command.add_option("--seed", s.trainer.seed, "Seed of the split, the parameters and the batches")
      ->capture_default_str()
      ->group(data);

  const std::string model = "Model";
  command.add_option("--dim", s.trainer.model.dim, "Width D of the hidden states")
      ->check(CLI::Range(8, 65536))
      ->capture_default_str()
      ->group(model);
  command.add_option("--inner", s.trainer.model.inner, "Channels of each recurrence")
      ->check(CLI::Range(8, 65536))
      ->capture_default_str()
      ->group(model);
  command.add_option("--layers", s.trainer.model.layers, "Recurrences")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->group(model);

  const std::string training = "Training";
  command.add_option("--batch", s.trainer.batch.batch, "Sequences a step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->group(training);
  command.add_option("--sequence-length", s.trainer.batch.length, "Tokens of a sequence")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->group(training);
  command.add_option("--learning-rate", s.schedule.peak, "Peak of the learning rate")
      ->check(CLI::Range(1e-9, 1.0))
      ->capture_default_str()
      ->group(training);
  command
      .add_option("--warmup-steps", s.schedule.warmup, "Steps to the peak; then a cosine to a tenth of it")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str()
      ->group(training);
  command.add_option("--weight-decay", s.trainer.optimizer.weight_decay, "AdamW's decay of the matrices")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str()
      ->group(training);
  command.add_option("--validation-batches", s.trainer.validation_batches, "Batches of each validation")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str()
      ->group(training);
  add_thinning_options(command, options.thinning, true);
  command.add_option("--budget", options.budget, "Largest workspace of the fused head, such as 64MiB")
      ->capture_default_str()
      ->group(training);
}

train::HeadGradient head_gradient(const ThinningOptions& options) {
  Problem problem;
  apply(options, problem);
  return {static_cast<Gradient>(problem.gradient), problem.threshold, problem.seed};
}

train::Results train_model(const train::Settings& settings, TrainDevice place,
                           const std::function<void(const std::string&)>& say) {
  try {
    return train::run_demonstration(settings, *place.device, std::move(place.context), say);
  } catch (const Error& error) {
    if (error.status() != LOGITLESS_BUDGET_TOO_SMALL) throw;
    throw UsageError(error.what());
  }
}

// As one word of a shell.
std::string quoted(const std::string& text) {
  std::string found = "'";
  for (const char c : text) found += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return found + "'";
}

// Commands that can be pasted as they are, and leave this run's results where they are. cuda: "cuda:N", or
// empty on the host.
std::string what_to_try_next(const train::Settings& settings, double checkpoint_loss,
                             const std::string& program, const std::string& cuda) {
  const std::string file = (settings.output / "model.safetensors").string();
  std::string text = "\nWhat to try next:\n";
  const auto add = [&](const std::string& what, const std::string& arguments) {
    text += "  " + what + "\n    " + quoted(program) + " " + arguments + "\n";
  };
  add("the loss of the validation text in the checkpoint, which was " + format_fixed(checkpoint_loss, 6) +
          " here",
      "loss --hidden " + quoted(file + ":hidden") + " --classifier " + quoted(file + ":lm_head.weight") +
          " --targets " + quoted(file + ":targets"));
  if (!cuda.empty()) {
    add("the first steps of the default model on the processors, with a GPU's losses but for rounding",
        "train --device cpu --steps 8 -o logitless-train-cpu");
  } else if (settings.gradient.kind == Gradient::exact) {
    add("the default model with thinned gradients",
        "train --gradient thinned --threshold 2^-9 -o logitless-train-thinned");
  } else {
    add("the default model with exact gradients, beside the materialized head",
        "train -o logitless-train-exact");
  }
  const std::string device = cuda.empty() ? "" : " --device " + cuda;
  add("the head of a model of yours: workspace, cost and time before it runs",
      "plan --model gemma-2-2b --tokens 8192 --budget 256MiB" + device);
  add(cuda.empty() ? "time and memory beside materialized logits" : "how fast this GPU is",
      cuda.empty() ? "bench --shape 1024,32768,512 --thinned 2^-9" : "bench" + device);
  return text;
}

void run(Options& options, const GlobalOptions& global, const CLI::App& command) {
  train::Settings& settings = options.settings;
  settings.gradient = head_gradient(options.thinning);
  if (settings.gradient.kind != Gradient::exact) {
    if (command.count("--compare-steps") != 0 && settings.compare_steps != 0) {
      throw UsageError(
          "--compare-steps: expected 0 with thinned gradients, which are not the materialized ones");
    }
    settings.compare_steps = 0;
  }
  settings.corpus.paths.assign(options.paths.begin(), options.paths.end());
  settings.corpus.max_bytes = static_cast<int64_t>(parse_size("--max-text", options.most_text));
  settings.corpus.seed = settings.trainer.seed;
  settings.max_workspace_bytes = static_cast<int64_t>(parse_size("--budget", options.budget));
  settings.output = options.output;
  settings.quiet = global.quiet;
  // What people read goes to stdout as it happens; with --json that is left to the document.
  const auto say = [&global](const std::string& line) {
    if (global.json && global.quiet) return;
    std::FILE* stream = global.json ? stderr : stdout;
    std::fprintf(stream, "%s\n", line.c_str());
    std::fflush(stream);
  };
  TrainDevice place = open_train_device(global, options.device);
  const std::string cuda = place.cuda;
  if (!cuda.empty() && command.count("--minutes") == 0) settings.minutes = kMinutesOnGpu;
  settings.device_note = place.note;
  const train::Results results = train_model(settings, std::move(place), say);
  nlohmann::ordered_json figures = train::to_json(results, settings);
  std::string written;
  for (const std::filesystem::path& path : train::write_plots(results, settings.output)) {
    written += (written.empty() ? "" : ", ") + path.filename().string();
  }
  write_text_file((settings.output / "figures.json").string(), figures.dump(1) + "\n");
  say(train::summary(results));
  say("Written to " + settings.output.string() + ": model.safetensors, tokenizer.json, figures.json, " +
      written);
  say(what_to_try_next(settings, results.checkpoint_loss, global.program, cuda));
  if (global.json) print_json(figures);
  if (results.agreement && !results.agreement->holds()) {
    throw std::runtime_error("the fused and the materialized head do not agree: see the differences above");
  }
  if (results.stop_signal != 0) {
    throw Interrupted(results.stop_signal, "interrupted; what was trained until then is written");
  }
}

}  // namespace

void add_train_command(CLI::App& app, const GlobalOptions& global) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("train", kDescription);
  command->footer(kFooter);
  add_options(*command, *options);
  command->callback([options, &global, command] { run(*options, global, *command); });
}

}  // namespace logitless::cli
