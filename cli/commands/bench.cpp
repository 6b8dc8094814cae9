#include <algorithm>
#include <cmath>
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

struct BenchOptions {
  std::vector<std::string> shapes;
  std::string dtype;
  std::string budgets;
  std::string thinned;  // thresholds
  int repeats = 0;
  std::string device = "cpu";
};

// What is measured where nothing else is asked for.
BenchOptions completed(BenchOptions options, bool on_device) {
  if (options.shapes.empty() && on_device) options.shapes = {"8192,128256,4096"};
  if (options.shapes.empty()) options.shapes = {"1024,32768,512", "512,131072,1024"};
  if (options.dtype.empty()) options.dtype = on_device ? "bf16" : "f32";
  if (options.budgets.empty()) options.budgets = on_device ? "160MiB,1GiB,0" : "16MiB,64MiB,256MiB,0";
  if (options.repeats == 0) options.repeats = on_device ? 20 : 3;
  return options;
}

struct ShapeResults {
  BenchShape shape;
  std::vector<BenchResult> results;
};

std::vector<BenchRequest> make_requests(const BenchOptions& options) {
  BenchRequest request;
  request.dtype = parse_dtype("--dtype", options.dtype);
  if (request.dtype == LOGITLESS_F64) throw UsageError("--dtype: expected f32, bf16 or f16, got 'f64'");
  request.repeats = options.repeats;
  for (const std::string& budget : split(options.budgets, ','))
    request.budgets.push_back(parse_budget("--budgets", budget));
  if (!options.thinned.empty()) {
    for (const std::string& threshold : split(options.thinned, ','))
      request.thresholds.push_back(parse_threshold("--thinned", threshold));
  }
  std::vector<BenchRequest> requests;
  for (const std::string& shape : options.shapes) {
    const std::vector<std::string> parts = split(shape, ',');
    if (parts.size() != 3) throw UsageError("--shape: expected TOKENS,VOCAB,HIDDEN, got '" + shape + "'");
    const auto number = [&](size_t i) {
      const int64_t value = parse_count("--shape", parts[i]);
      if (value < 1 || value > (int64_t{1} << 31) - 1) {
        throw UsageError("--shape: expected numbers from 1 to 2^31 - 1, got '" + shape + "'");
      }
      return value;
    };
    request.shape = {number(0), number(1), number(2)};
    requests.push_back(request);
  }
  return requests;
}

// The materialized result with the same outputs; null without one.
const BenchResult* baseline(const ShapeResults& of, bool gradients) {
  for (const BenchResult& result : of.results) {
    if (!result.budget_bytes && result.gradients == gradients && !result.seconds.empty()) return &result;
  }
  return nullptr;
}

ordered_json result_json(const ShapeResults& of, const BenchResult& result) {
  const double flop = (result.gradients ? 3.0 : 1.0) * 2 * static_cast<double>(of.shape.tokens) *
                      static_cast<double>(of.shape.vocab) * static_cast<double>(of.shape.dim);
  const BenchResult* base = baseline(of, result.gradients);
  return {
      {"method", result.method},
      {"gradients", result.gradients},
      {"budget_bytes", result.budget_bytes ? ordered_json(*result.budget_bytes) : ordered_json(nullptr)},
      {"threshold", result.threshold ? ordered_json(*result.threshold) : ordered_json(nullptr)},
      {"refusal", result.refusal.empty() ? ordered_json(nullptr) : ordered_json(result.refusal)},
      {"median_seconds", result.median_seconds()},
      {"seconds", result.seconds},
      {"time_over_materialized", base != nullptr ? result.median_seconds() / base->median_seconds() : NAN},
      {"gflop_per_second", flop / result.median_seconds() * 1e-9},
      {"peak_extra_bytes",
       result.peak_extra_bytes ? ordered_json(*result.peak_extra_bytes) : ordered_json(nullptr)},
      {"workspace_bytes", result.workspace_bytes},
      {"loss", result.loss},
      {"detail", result.detail}};
}

void print_table(const ShapeResults& of, const BenchOptions& options, bool on_device) {
  std::cout << "tokens x vocab x hidden = " << of.shape.text() << ", " << options.dtype
            << (on_device ? ", " + options.device : "") << "\n";
  Table table(on_device ? std::vector<std::string>{"method", "computes", "time", "TFLOP/s", "workspace",
                                                   "loss", "plan"}
                        : std::vector<std::string>{"method", "computes", "time", "/ materialized", "GFLOP/s",
                                                   "peak extra", "workspace", "loss"});
  for (const BenchResult& result : of.results) {
    std::vector<std::string> row{result.method, result.gradients ? "loss + gradients" : "loss"};
    if (!result.refusal.empty()) {
      row.emplace_back("refused");
      table.add(row);
      continue;
    }
    const ordered_json json = result_json(of, result);
    const double ratio = json["time_over_materialized"], gflops = json["gflop_per_second"];
    row.push_back(format_seconds(result.median_seconds()));
    if (!on_device) row.push_back(std::isnan(ratio) ? "-" : format_number(ratio, 3));
    row.push_back(format_number(on_device ? gflops * 1e-3 : gflops, 3));
    if (!on_device) row.push_back(format_bytes(static_cast<double>(result.peak_extra_bytes.value_or(0))));
    row.push_back(format_budget(static_cast<double>(result.workspace_bytes)));
    row.push_back(format_number(result.loss, 7));
    if (on_device) row.push_back(result.detail);
    table.add(row);
  }
  std::cout << table.text();
  for (const BenchResult& result : of.results) {
    if (!result.refusal.empty()) std::cout << "refused: " << result.method << ": " << result.refusal << "\n";
  }
  std::cout << "\n";
}

void run(const BenchOptions& given, const GlobalOptions& globals) {
  const DeviceChoice device = parse_device(globals, given.device);
  const bool on_device = device.ordinal != LOGITLESS_HOST_MEMORY;
  const BenchOptions options = completed(given, on_device);
  const std::vector<BenchRequest> requests = make_requests(options);
  const std::string why_not = on_device ? "--device measures Logitless alone" : why_not_materialized();
  int64_t steps = 0;
  for (const BenchRequest& request : requests) {
    steps += static_cast<int64_t>(bench_methods(request, why_not.empty()).size()) * request.repeats;
  }
  std::vector<ShapeResults> all;
  {
    Progress progress(globals.quiet, "bench", steps);
    int64_t done = 0;
    for (const BenchRequest& request : requests) {
      const auto step = [&](const std::string& note) { progress.update(++done, note); };
      all.push_back({request.shape, run_bench(globals, request, device, step)});
    }
  }
  if (globals.json) {
    ordered_json shapes = ordered_json::array();
    for (const ShapeResults& of : all) {
      ordered_json results = ordered_json::array();
      for (const BenchResult& result : of.results) results.push_back(result_json(of, result));
      shapes.push_back({{"tokens", of.shape.tokens},
                        {"vocab", of.shape.vocab},
                        {"hidden", of.shape.dim},
                        {"results", results}});
    }
    print_json({{"device", options.device},
                {"dtype", options.dtype},
                {"repeats", options.repeats},
                {"why_not_materialized", why_not.empty() ? ordered_json(nullptr) : ordered_json(why_not)},
                {"shapes", shapes}});
    return;
  }
  for (const ShapeResults& of : all) print_table(of, options, on_device);
  if (!why_not.empty()) std::cout << "materialized: not measured, " << why_not << "\n";
  std::cout << (on_device ? "T" : "G")
            << "FLOP/s count 1 F for the loss and 3 F with gradients, F = 2 x tokens x vocab x hidden.\n";
}

}  // namespace

void add_bench_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command = app.add_subcommand("bench", "Time and peak extra memory against materialized logits");
  const auto options = std::make_shared<BenchOptions>();
  command->add_option("--shape", options->shapes, "TOKENS,VOCAB,HIDDEN; may be given several times")
      ->delimiter(';')
      ->default_str("1024,32768,512;512,131072,1024, on a device 8192,128256,4096");
  command->add_option("--dtype", options->dtype, "Of hidden and classifier: f32, bf16 or f16")
      ->default_str("f32, on a device bf16");
  command->add_option("--budgets", options->budgets, "Budgets of the workspace; 0: by default, or fastest")
      ->default_str("16MiB,64MiB,256MiB,0, on a device 160MiB,1GiB,0");
  command->add_option("--thinned", options->thinned,
                      "Thinned gradients too, at these thresholds: 2^-8,2^-10");
  command->add_option("--repeat", options->repeats, "Runs of each, of which the median is shown")
      ->check(CLI::Range(1, 1000))
      ->default_str("3, on a device 20");
  command->add_option("--device", options->device, "Where to measure: cpu, or cuda:N; see 'logitless info'")
      ->capture_default_str();
  command->footer(
      "\nThe materialized computation holds float32 logits: a matrix product of oneDNN, softmax in place, "
      "two more\n"
      "products for the gradients. For bf16 and f16 it takes the operands widened to float32 beforehand. All "
      "methods\n"
      "run in turn, allocation included. Peak extra memory is resident memory beyond inputs and outputs.\n"
      "On a CUDA device Logitless is measured alone, by the device's own clock, after a warm-up.\n"
      "\n"
      "Examples:\n"
      "  logitless bench\n"
      "  logitless bench --shape 2048,32768,256 --budgets 32MiB,256MiB\n"
      "  logitless bench --shape 1024,131072,1024 --thinned 2^-9,2^-11\n"
      "  logitless --threads 2 --json bench --shape 512,256000,2304 --dtype bf16 --repeat 5\n"
      "  logitless bench --device cuda:0 --shape 8192,256000,2304\n");
  command->callback([options, &globals] { run(*options, globals); });
}

}  // namespace logitless::cli
