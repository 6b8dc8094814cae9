#include <iostream>
#include <memory>
#include <stdexcept>

#include "commands/bench.h"
#include "commands/options.h"
#include "support/format.h"
#include "support/progress.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

struct TuneOptions {
  std::string device = "cuda:0";
  std::vector<std::string> shapes;
  double minutes = 1;
  std::string out;
};

std::string tuned(const TuneOptions& options, const GlobalOptions& globals, const DeviceChoice& device) {
  std::vector<int64_t> heads;
  for (const std::string& text : options.shapes) {
    const BenchShape shape = parse_shape(text);
    heads.insert(heads.end(), {shape.tokens, shape.vocab, shape.dim});
  }
  constexpr int64_t kSteps = 100;
  Progress progress(globals.quiet, "tune", kSteps);
  logitless_tune_options given{};
  given.device = device.ordinal;
  given.heads = heads.data();
  given.head_count = options.shapes.size();
  given.seconds = options.minutes * 60;
  given.path = options.out.empty() ? nullptr : options.out.c_str();
  given.progress = [](double share, void* data) {
    static_cast<Progress*>(data)->update(static_cast<int64_t>(share * kSteps));
    return 0;
  };
  given.progress_data = &progress;
  try {
    return tune(given);
  } catch (const Error& error) {
    const std::string flag = error.argument == "path"              ? "--out"
                             : error.argument.starts_with("heads") ? "--shape"
                                                                   : "";
    if (flag.empty()) throw;
    throw std::runtime_error(flag + ": expected " + error.expected + ", got " + error.got);
  }
}

void run(const TuneOptions& options, const GlobalOptions& globals) {
  const DeviceChoice device = parse_device(globals, options.device);
  if (device.is_host()) throw UsageError("--device: expected cuda:N, got '" + options.device + "'");
  const std::string text = tuned(options, globals, device);
  if (globals.json) {
    std::cout << text;
    return;
  }
  const auto record = ordered_json::parse(text);
  std::cout << table_text(record["runs"], {"tokens", "vocab", "hidden", "work", "engine", "median_seconds",
                                           "repeats", "plan"})
            << "\n";
  print_report(
      {{"fastest_engines", record["engines"]}, {"rates", record["rates"]}, {"device_record", record["file"]}},
      false);
}

}  // namespace

void add_tune_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("tune", "Measure a GPU, and write the record by which it is used later");
  const auto options = std::make_shared<TuneOptions>();
  command->add_option("--device", options->device, "Device to measure: cuda:N; see 'logitless info'")
      ->capture_default_str();
  command->add_option("--shape", options->shapes, "TOKENS,VOCAB,HIDDEN; may be given several times")
      ->delimiter(';')
      ->default_str("five common heads");
  command
      ->add_option("--minutes", options->minutes, "Time for the measurements; each engine runs at least once")
      ->check(CLI::Range(0.01, 1440.0))
      ->capture_default_str();
  command->add_option("--out", options->out, "File to write")
      ->default_str("the device's own, in LOGITLESS_DEVICE_RECORDS or ~/.config/logitless/devices");
  command->footer(
      "\nLoss, exact and sparsified gradients are timed in bf16 with each engine that runs on the device, in "
      "turn.\n"
      "Programs that start later use the fastest engine for each, and predict times from the measured "
      "rates.\n"
      "'logitless info' says which record a device uses. Delete the file to return to the defaults.\n"
      "\n"
      "Examples:\n"
      "  logitless tune\n"
      "  logitless tune --device cuda:1 --shape 8192,151936,4096 --minutes 0.5\n"
      "  logitless --json tune --out a10.json\n");
  command->callback([options, &globals] { run(*options, globals); });
}

}  // namespace logitless::cli
