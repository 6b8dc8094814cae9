#include "commands/bench.h"

#include <sys/resource.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>

#include "commands/options.h"
#include "commands/run.h"
#include "support/format.h"
#include "support/progress.h"

namespace logitless::cli {
namespace {

using nlohmann::ordered_json;

// One way to compute the loss (and gradients) of a shape.
struct BenchResult {
  std::string method;  // "materialized", or "logitless" with its budget
  bool gradients = false;
  std::optional<uint64_t> budget_bytes = {};  // 0: none; no value: materialized
  std::optional<double> threshold = {};       // for sparsified gradients
  std::string refusal = {};                   // reason why it did not run; else empty
  std::string detail = {};                    // plan and configuration
  int64_t workspace_bytes = 0;                // as the method reports it
  // Measured resident memory beyond inputs and outputs; no value on a device, where runs allocate none.
  std::optional<int64_t> peak_extra_bytes = {};
  std::vector<double> seconds = {};  // time of each repeat
  double loss = 0;
  double median_seconds() const {
    if (seconds.empty()) return NAN;
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
  }
};

constexpr int kWarmUps = 2;

// Returns the most resident memory of this process since the last reset. Only Linux can reset it; elsewhere
// it counts from the process's start. 0 if the system does not say.
int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::strtoll(line.c_str() + 6, nullptr, 10) * 1024;
  }
  rusage usage{};
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_maxrss * 1024 : 0;
}

// Starts the count at the memory that is resident now, without memory that was freed.
void reset_peak_resident_bytes() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
  std::ofstream("/proc/self/clear_refs") << "5\n";
}

// Returns `count` normal numbers in the dtype. They come from a pool read at a stride, as drawing each would
// take longer than the measurement. `wide`, if not null, gets the same numbers in float32.
std::vector<std::byte> normal_numbers(int64_t count, double std, logitless_dtype dtype, uint64_t seed,
                                      std::vector<float>* wide) {
  std::vector<double> pool(1 << 16);
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, std);
  for (double& value : pool) value = normal(random);
  const std::vector<std::byte> encoded = encode(pool, dtype);
  pool = decode(encoded, dtype);
  const auto size = static_cast<size_t>(dtype_bytes(dtype)), elements = static_cast<size_t>(count);
  std::vector<std::byte> out(elements * size);
  if (wide != nullptr) wide->resize(elements);
  for (size_t i = 0; i < elements; ++i) {
    const size_t source = (i * 40503 + i / 65537) % pool.size();
    if (wide != nullptr) (*wide)[i] = static_cast<float>(pool[source]);
    std::memcpy(&out[i * size], &encoded[source * size], size);
  }
  return out;
}

// Returns the problem of a method, for the tensors in the buffers.
Problem make_problem(const BenchShape& shape, logitless_dtype dtype, const BenchResult& method) {
  Problem problem;
  problem.tokens = shape.tokens;
  problem.vocab = shape.vocab;
  problem.hidden = shape.dim;
  problem.dtype = {dtype, dtype, dtype, LOGITLESS_I32, dtype, dtype, dtype};
  problem.pass = method.gradients ? LOGITLESS_FORWARD_BACKWARD : LOGITLESS_FORWARD;
  problem.max_workspace_bytes = *method.budget_bytes;
  if (method.threshold) set_gradient(problem, Gradient::sparsified, *method.threshold);
  return problem;
}

void describe(const PlanInfo& info, double loss, BenchResult& result) {
  result.loss = loss;
  result.workspace_bytes = static_cast<int64_t>(info.workspace_bytes);
  result.detail = std::string(logitless_plan_kind_name(static_cast<logitless_plan_kind>(info.kind))) + ", " +
                  info.backend + " " + info.config;
}

// Hidden states, a weight whose logits have a standard deviation of 2, targets, and room for gradients. The
// numbers are the same on the host and on a device.
class Bench {
 public:
  Bench(const GlobalOptions& globals, const BenchShape& shape, logitless_dtype dtype,
        const DeviceChoice& device)
      : shape_(shape),
        dtype_(dtype),
        threads_(globals.threads),
        context_(make_context(globals, {}, device)),
        runner_(context_, device.ordinal),
        d_hidden_(static_cast<size_t>(shape.tokens * shape.dim) * sizeof(float)),
        d_weight_(static_cast<size_t>(shape.vocab * shape.dim) * sizeof(float)) {
    const auto& [tokens, vocab, dim] = shape;
    const bool widens = device.is_host() && why_not_materialized().empty();
    hidden_ = normal_numbers(tokens * dim, 1, dtype, 1, widens ? &wide_hidden_ : nullptr);
    weight_ = normal_numbers(vocab * dim, 2 / std::sqrt(static_cast<double>(dim)), dtype, 2,
                             widens ? &wide_weight_ : nullptr);
    std::mt19937_64 random(3);
    std::uniform_int_distribution<int32_t> ids(0, static_cast<int32_t>(vocab - 1));
    targets_.resize(static_cast<size_t>(tokens));
    for (int32_t& target : targets_) target = ids(random);
    for (const Workspace* room : {&d_hidden_, &d_weight_}) {
      // The pages are written before the clock starts, so that they exist.
      if (device.is_host()) std::fill(room->bytes().begin(), room->bytes().end(), std::byte{1});
    }
    const auto bytes = [](const auto& values) { return std::as_bytes(std::span(values)); };
    buffers_ = runner_.place({{LOGITLESS_TENSOR_HIDDEN, hidden_},
                              {LOGITLESS_TENSOR_WEIGHT, weight_},
                              {LOGITLESS_TENSOR_TARGETS, bytes(targets_)},
                              {LOGITLESS_TENSOR_LOSS, bytes(std::span(&loss_, 1))},
                              {LOGITLESS_TENSOR_D_HIDDEN, d_hidden_.bytes().first(hidden_.size())},
                              {LOGITLESS_TENSOR_D_WEIGHT, d_weight_.bytes().first(weight_.size())}});
  }

  // Runs and times a method once, or notes why it cannot run.
  void measure(BenchResult& result) {
    Buffers& buffers = runner_.buffers();
    buffers.d_hidden = result.gradients ? buffers_.d_hidden : nullptr;
    buffers.d_weight = result.gradients ? buffers_.d_weight : nullptr;
    const bool on_device = runner_.device() != nullptr;
    try {
      on_device ? measure_on_device(result) : measure_on_host(result);
    } catch (const Error& error) {
      if (error.status() != LOGITLESS_BUDGET_TOO_SMALL) throw;
      result.refusal = error.what();
    } catch (const std::bad_alloc&) {
      result.refusal = on_device ? "not enough memory on the device" : "not enough memory";
    }
  }

 private:
  void measure_on_device(BenchResult& result) {
    const PlanInfo info = runner_.prepare(make_problem(shape_, dtype_, result));
    const auto run = [&] { runner_.launch(); };
    for (int i = 0; result.seconds.empty() && i < kWarmUps; ++i) run();
    run();  // keeps the device busy while the next run is queued
    result.seconds.push_back(runner_.device()->seconds_of(run));
    runner_.device()->download(std::as_writable_bytes(std::span(&loss_, 1)), buffers_.loss);
    describe(info, static_cast<double>(loss_), result);
  }

  void measure_on_host(BenchResult& result) {
    reset_peak_resident_bytes();
    const int64_t before = peak_resident_bytes();
    const auto start = std::chrono::steady_clock::now();
    if (result.budget_bytes) {
      const PlanInfo info = run_once(context_, make_problem(shape_, dtype_, result), runner_.buffers());
      describe(info, static_cast<double>(loss_), result);
    } else {
      const auto floats = [](const Workspace& room) { return reinterpret_cast<float*>(room.bytes().data()); };
      float* d_hidden = result.gradients ? floats(d_hidden_) : nullptr;
      result.loss = materialized_loss(shape_, wide_hidden_.data(), wide_weight_.data(), targets_.data(),
                                      d_hidden, floats(d_weight_), threads_);
      result.workspace_bytes = shape_.tokens * (shape_.vocab * 4 + 8);
      result.detail = "fp32 logits in memory, " + materialized_by();
    }
    result.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    result.peak_extra_bytes = std::max(result.peak_extra_bytes.value_or(0), peak_resident_bytes() - before);
  }

  BenchShape shape_;
  logitless_dtype dtype_;
  int threads_;
  Context context_;
  Runner runner_;
  std::vector<std::byte> hidden_, weight_;
  std::vector<float> wide_hidden_, wide_weight_;  // for the materialized computation
  std::vector<int32_t> targets_;
  Workspace d_hidden_, d_weight_;  // room for any dtype
  float loss_ = 0;
  Buffers buffers_;  // with all outputs
};

std::string text_of(const BenchShape& shape) {
  return std::to_string(shape.tokens) + " x " + std::to_string(shape.vocab) + " x " +
         std::to_string(shape.dim);
}

struct BenchOptions {
  std::vector<std::string> shapes;
  std::string dtype;
  std::string budgets;
  std::string sparsified;  // thresholds
  int repeats = 0;
  std::string device = "cpu";
};

// Fills in the shapes, dtype, budgets and repeats that the options leave out.
BenchOptions completed(BenchOptions options, bool on_device) {
  if (options.shapes.empty() && on_device) options.shapes = {"8192,128256,4096"};
  if (options.shapes.empty()) options.shapes = {"1024,32768,512", "512,131072,1024"};
  if (options.dtype.empty()) options.dtype = on_device ? "bf16" : "f32";
  if (options.budgets.empty()) options.budgets = on_device ? "160MiB,1GiB,0" : "16MiB,64MiB,256MiB,0";
  if (options.repeats == 0) options.repeats = on_device ? 20 : 3;
  return options;
}

logitless_dtype parse_bench_dtype(const std::string& text) {
  const logitless_dtype dtype = parse_dtype("--dtype", text);
  if (dtype == LOGITLESS_F64) throw UsageError("--dtype: expected f32, bf16 or f16, got 'f64'");
  return dtype;
}

}  // namespace

BenchShape parse_shape(const std::string& text) {
  const std::vector<std::string> parts = split(text, ',');
  if (parts.size() != 3) throw UsageError("--shape: expected TOKENS,VOCAB,HIDDEN, got '" + text + "'");
  const auto number = [&](size_t i) {
    const int64_t value = parse_count("--shape", parts[i]);
    if (value < 1 || value > INT32_MAX)
      throw UsageError("--shape: expected numbers from 1 to 2^31 - 1, got '" + text + "'");
    return value;
  };
  return {number(0), number(1), number(2)};
}

namespace {

// Returns the methods in the order of the report, before any run.
std::vector<BenchResult> bench_methods(const BenchOptions& options, bool materialized) {
  std::vector<BenchResult> methods;
  for (const bool gradients : {false, true}) {
    if (materialized) methods.push_back({"materialized", gradients});
    for (const std::string& text : split(options.budgets, ',')) {
      const uint64_t budget = parse_budget("--budgets", text);
      const std::string name = budget == 0                   ? "no budget"
                               : budget == LOGITLESS_FASTEST ? "fastest"
                                                             : format_bytes(static_cast<double>(budget));
      methods.push_back({"logitless, " + name, gradients, budget});
    }
    if (!gradients || options.sparsified.empty()) continue;
    for (const std::string& text : split(options.sparsified, ',')) {
      const double threshold = parse_threshold("--sparsified", text);
      methods.push_back({"logitless, sparsified " + format_number(threshold, 3), true, 0, threshold});
    }
  }
  return methods;
}

// Returns the time as a share of that of materialized logits with the same outputs; NaN without these.
double over_materialized(const std::vector<BenchResult>& results, const BenchResult& result) {
  for (const BenchResult& other : results) {
    if (!other.budget_bytes && other.gradients == result.gradients)
      return result.median_seconds() / other.median_seconds();
  }
  return NAN;
}

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json shape_json(const BenchShape& shape, const std::vector<BenchResult>& results) {
  ordered_json list = ordered_json::array();
  for (const BenchResult& result : results) {
    const double flop = (result.gradients ? 3.0 : 1.0) * 2 * static_cast<double>(shape.tokens) *
                        static_cast<double>(shape.vocab) * static_cast<double>(shape.dim);
    list.push_back(
        {{"method", result.method},
         {"gradients", result.gradients},
         {"budget_bytes", or_null(result.budget_bytes)},
         {"threshold", or_null(result.threshold)},
         {"refusal", result.refusal.empty() ? ordered_json(nullptr) : ordered_json(result.refusal)},
         {"median_seconds", result.median_seconds()},
         {"seconds", result.seconds},
         {"time_over_materialized", over_materialized(results, result)},
         {"gflop_per_second", flop / result.median_seconds() * 1e-9},
         {"peak_extra_bytes", or_null(result.peak_extra_bytes)},
         {"workspace_bytes", result.workspace_bytes},
         {"loss", result.loss},
         {"detail", result.detail}});
  }
  return {{"tokens", shape.tokens}, {"vocab", shape.vocab}, {"hidden", shape.dim}, {"results", list}};
}

// Runs all methods in turn, `repeats` times over, so that a good moment of the machine helps none of them
// alone. On the host the time includes allocating and releasing workspaces and logits. On a CUDA device there
// are no materialized logits. There the time is the device's own, and each timed run follows another one on
// the stream, so that it does not wait for launches; workspaces are allocated before.
void run(const BenchOptions& given, const GlobalOptions& globals) {
  const DeviceChoice device = parse_device(globals, given.device);
  const BenchOptions options = completed(given, !device.is_host());
  const logitless_dtype dtype = parse_bench_dtype(options.dtype);
  const std::string why_not = device.is_host() ? why_not_materialized() : "--device measures Logitless alone";
  const std::vector<BenchResult> methods = bench_methods(options, why_not.empty());
  std::vector<BenchShape> shapes;
  shapes.reserve(options.shapes.size());
  for (const std::string& text : options.shapes) shapes.push_back(parse_shape(text));

  int64_t done = 0;
  const int64_t runs = static_cast<int64_t>(methods.size() * shapes.size()) * options.repeats;
  auto progress = std::make_unique<Progress>(globals.quiet, "bench", runs);
  ordered_json all = ordered_json::array();
  for (const BenchShape& shape : shapes) {
    Bench bench(globals, shape, dtype, device);
    std::vector<BenchResult> results = methods;
    for (int repeat = 0; repeat < options.repeats; ++repeat) {
      for (BenchResult& result : results) {
        if (result.refusal.empty()) bench.measure(result);
        progress->update(++done, text_of(shape) + ", " + result.method);
      }
    }
    all.push_back(shape_json(shape, results));
  }
  progress.reset();
  if (globals.json) {
    return print_json(
        {{"device", options.device},
         {"dtype", options.dtype},
         {"repeats", options.repeats},
         {"why_not_materialized", why_not.empty() ? ordered_json(nullptr) : ordered_json(why_not)},
         {"shapes", all}});
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    std::cout << "tokens x vocab x hidden = " << text_of(shapes[i]) << ", " << options.dtype << ", "
              << options.device << "\n"
              << table_text(all[i]["results"],
                            {"method", "gradients", "median_seconds", "time_over_materialized",
                             "gflop_per_second", "peak_extra_bytes", "workspace_bytes", "loss"});
    for (const auto& result : all[i]["results"]) {
      const ordered_json& said = result[result["refusal"].is_null() ? "detail" : "refusal"];
      std::cout << (result["refusal"].is_null() ? "" : "refused: ") << result["method"].get<std::string>()
                << ": " << said.get<std::string>() << "\n";
    }
    std::cout << "\n";
  }
  if (!why_not.empty()) std::cout << "materialized: not measured, " << why_not << "\n";
  std::cout << "FLOP count 1 F for the loss and 3 F with gradients, F = 2 x tokens x vocab x hidden.\n";
}

}  // namespace

void add_bench_command(CLI::App& app, const GlobalOptions& globals) {
  CLI::App* command =
      app.add_subcommand("bench", "Compare time and peak extra memory with materialized logits");
  const auto options = std::make_shared<BenchOptions>();
  command->add_option("--shape", options->shapes, "TOKENS,VOCAB,HIDDEN; may be given several times")
      ->delimiter(';')
      ->default_str("1024,32768,512;512,131072,1024, on a device 8192,128256,4096");
  command->add_option("--dtype", options->dtype, "Dtype of hidden and weight: f32, bf16 or f16")
      ->default_str("f32, on a device bf16");
  command
      ->add_option("--budgets", options->budgets, "Workspace budgets; 0: the default plan; fastest: no limit")
      ->default_str("16MiB,64MiB,256MiB,0, on a device 160MiB,1GiB,0");
  command->add_option("--sparsified", options->sparsified,
                      "Also measure sparsified gradients, at these thresholds: 2^-8,2^-10");
  command->add_option("--repeat", options->repeats, "Runs of each method; the median is shown")
      ->check(CLI::Range(1, 1000))
      ->default_str("3, on a device 20");
  command
      ->add_option("--device", options->device, "Device to measure on: cpu, or cuda:N; see 'logitless info'")
      ->capture_default_str();
  command->footer(
      "\nThe materialized computation holds float32 logits: a matrix product of oneDNN, a softmax in place, "
      "and two\n"
      "more products for the gradients. Its bf16 and f16 operands are widened to float32 beforehand. All "
      "methods\n"
      "run in turn, and times include allocation. Peak extra memory is resident memory beyond inputs and "
      "outputs.\n"
      "On a CUDA device only Logitless is measured, by the device's own clock, after a warm-up.\n"
      "\n"
      "Examples:\n"
      "  logitless bench\n"
      "  logitless bench --shape 2048,32768,256 --budgets 32MiB,256MiB\n"
      "  logitless bench --shape 1024,131072,1024 --sparsified 2^-9,2^-11\n"
      "  logitless --threads 2 --json bench --shape 512,256000,2304 --dtype bf16 --repeat 5\n"
      "  logitless bench --device cuda:0 --shape 8192,256000,2304\n");
  command->callback([options, &globals] { run(*options, globals); });
}

}  // namespace logitless::cli
