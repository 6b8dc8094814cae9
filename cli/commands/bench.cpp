#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <stdexcept>

#include "commands/bench_run.h"
#include "commands/commands.h"
#include "commands/context.h"
#include "commands/loss_options.h"
#include "commands/units.h"
#include "io/atomic_file.h"
#include "plot/chart.h"
#include "progress.h"

namespace headroom::cli {
namespace {

using nlohmann::ordered_json;

struct BenchOptions {
  std::vector<std::string> shapes{"1024,32768,512", "512,131072,1024"};
  std::string dtype = "f32";
  std::string budgets = "16MiB,64MiB,256MiB,0";
  int repeats = 3;
  std::string svg;
};

struct ShapeResults {
  BenchShape shape;
  std::vector<BenchResult> results;
};

std::vector<BenchRequest> make_requests(const BenchOptions& options) {
  BenchRequest request;
  request.dtype = parse_dtype("--dtype", options.dtype);
  if (request.dtype == HEADROOM_F64) throw UsageError("--dtype: expected f32, bf16 or f16, got 'f64'");
  request.repeats = options.repeats;
  for (const std::string& budget : split(options.budgets, ','))
    request.budgets.push_back(parse_size("--budgets", budget));
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
      {"refusal", result.refusal.empty() ? ordered_json(nullptr) : ordered_json(result.refusal)},
      {"median_seconds", result.median_seconds()},
      {"seconds", result.seconds},
      {"time_over_materialized", base != nullptr ? result.median_seconds() / base->median_seconds() : NAN},
      {"gflop_per_second", flop / result.median_seconds() * 1e-9},
      {"peak_extra_bytes", result.peak_extra_bytes},
      {"workspace_bytes", result.workspace_bytes},
      {"loss", result.loss},
      {"detail", result.detail}};
}

void print_table(const ShapeResults& of, const std::string& dtype) {
  std::cout << "tokens x vocab x hidden = " << of.shape.text() << ", " << dtype << "\n";
  Table table({"method", "computes", "time", "/ materialized", "GFLOP/s", "peak extra", "workspace", "loss"});
  for (const BenchResult& result : of.results) {
    const std::string what = result.gradients ? "loss + gradients" : "loss";
    if (!result.refusal.empty()) {
      table.add({result.method, what, "refused"});
      continue;
    }
    const ordered_json json = result_json(of, result);
    const double ratio = json["time_over_materialized"];
    table.add({result.method, what, format_seconds(result.median_seconds()),
               std::isnan(ratio) ? "-" : format_number(ratio, 3), format_number(json["gflop_per_second"], 3),
               format_bytes(static_cast<double>(result.peak_extra_bytes)),
               format_bytes(static_cast<double>(result.workspace_bytes)), format_number(result.loss, 7)});
  }
  std::cout << table.text();
  for (const BenchResult& result : of.results) {
    if (!result.refusal.empty()) std::cout << "refused: " << result.method << ": " << result.refusal << "\n";
  }
  std::cout << "\n";
}

// Time against peak extra memory, loss and gradients: a line of budgets and one point of the materialized
// computation for each shape.
std::string draw(const std::vector<ShapeResults>& all, const std::string& dtype) {
  plot::LineChart chart;
  chart.title = "Loss and gradients: time against extra memory";
  chart.subtitle = dtype + "; tokens x vocabulary x hidden";
  chart.x = {.label = "peak extra memory", .log = true, .unit = plot::Unit::kBytes};
  chart.y = {.label = "median time", .unit = plot::Unit::kSeconds};
  int color = 0;
  for (const ShapeResults& of : all) {
    plot::Series fused{.label = "headroom, " + of.shape.text(),
                       .x = {},
                       .y = {},
                       .stroke = plot::Stroke::kSolidWithPoints,
                       .color = color};
    plot::Series plain{.label = "materialized, " + of.shape.text(),
                       .x = {},
                       .y = {},
                       .stroke = plot::Stroke::kPoints,
                       .color = color};
    for (const BenchResult& result : of.results) {
      if (!result.gradients || result.seconds.empty()) continue;
      plot::Series& series = result.budget_bytes ? fused : plain;
      // A page is the least that the system can tell.
      series.x.push_back(static_cast<double>(std::max<int64_t>(result.peak_extra_bytes, 4096)));
      series.y.push_back(result.median_seconds());
    }
    for (plot::Series* series : {&fused, &plain}) {
      if (!series->x.empty()) chart.series.push_back(*series);
    }
    ++color;
  }
  // From 0 while that leaves the fastest readable.
  double fastest = HUGE_VAL;
  double slowest = 0;
  for (const plot::Series& series : chart.series) {
    for (const double seconds : series.y) {
      fastest = std::min(fastest, seconds);
      slowest = std::max(slowest, seconds);
    }
  }
  chart.y.log = slowest > 10 * fastest;
  if (!chart.y.log) chart.y.min = 0;
  return plot::to_svg(chart);
}

void run(const BenchOptions& options, const GlobalOptions& globals) {
  const std::vector<BenchRequest> requests = make_requests(options);
  int64_t steps = 0;
  for (const BenchRequest& request : requests) steps += bench_steps(request);
  std::vector<ShapeResults> all;
  {
    Progress progress(globals, "bench", steps);
    int64_t done = 0;
    for (const BenchRequest& request : requests) {
      all.push_back({request.shape, run_bench(globals, request, [&](const std::string& note) {
                       progress.update(++done, note);
                     })});
    }
  }
  if (!options.svg.empty()) write_text_file(options.svg, draw(all, options.dtype));
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
    print_json(
        {{"dtype", options.dtype},
         {"repeats", options.repeats},
         {"why_not_materialized",
          why_not_materialized().empty() ? ordered_json(nullptr) : ordered_json(why_not_materialized())},
         {"shapes", shapes},
         {"svg", options.svg.empty() ? ordered_json(nullptr) : ordered_json(options.svg)}});
    return;
  }
  for (const ShapeResults& of : all) print_table(of, options.dtype);
  if (!why_not_materialized().empty())
    std::cout << "materialized: not measured, " << why_not_materialized() << "\n";
  std::cout << "GFLOP/s count 1 F for the loss and 3 F with gradients, F = 2 x tokens x vocab x hidden.\n";
  if (!options.svg.empty()) std::cout << "plot: " << options.svg << "\n";
}

}  // namespace

void add_bench_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command = app.add_subcommand("bench", "Time and peak extra memory against materialized logits");
  const auto options = std::make_shared<BenchOptions>();
  command->add_option("--shape", options->shapes, "TOKENS,VOCAB,HIDDEN; may be given several times")
      ->delimiter(';')
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "Of hidden and classifier: f32, bf16 or f16")
      ->capture_default_str();
  command->add_option("--budgets", options->budgets, "Budgets of the workspace, 0 for none")
      ->capture_default_str();
  command->add_option("--repeat", options->repeats, "Runs of each, of which the median is shown")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--svg", options->svg, "Write a plot of time against memory to this file");
  command->footer(
      "\nThe materialized computation holds float32 logits: a matrix product of oneDNN, softmax in place, "
      "two more\n"
      "products for the gradients. For bf16 and f16 it takes the operands widened to float32 beforehand. All "
      "methods\n"
      "run in turn, allocation included. Peak extra memory is resident memory beyond inputs and outputs.\n"
      "\n"
      "Examples:\n"
      "  headroom bench\n"
      "  headroom bench --shape 2048,32768,256 --budgets 32MiB,256MiB --svg bench.svg\n"
      "  headroom --threads 2 --json bench --shape 512,256000,2304 --dtype bf16 --repeat 5\n");
  command->callback([options, &globals] { run(*options, globals); });
}

}  // namespace headroom::cli
