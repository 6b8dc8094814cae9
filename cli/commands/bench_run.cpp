#include "commands/bench_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "commands/bench_data.h"
#include "commands/context.h"
#include "support/format.h"
#include "support/process_memory.h"

namespace logitless::cli {
namespace {

// Operands as the library takes them and, for the materialized computation, as float32.
struct Operands {
  std::vector<float> hidden;       // [N, D]
  std::vector<float> classifier;   // [V, D]
  std::vector<uint16_t> hidden16;  // the same numbers in 16 bits; empty for float32
  std::vector<uint16_t> classifier16;
  std::vector<int32_t> targets;
  std::vector<float> d_hidden;  // written before the clock starts, so that its pages exist
  std::vector<float> d_classifier;
};

void fill(std::vector<float>& values, std::vector<uint16_t>& half, int64_t count,
          const NormalNumbers& numbers, bool narrow) {
  values.resize(static_cast<size_t>(count));
  if (narrow) half.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = numbers.value(i);
    if (narrow) half[i] = numbers.bits(i);
  }
}

Operands make_operands(const BenchRequest& request) {
  const auto& [tokens, vocab, dim] = request.shape;
  const bool narrow = request.dtype != LOGITLESS_F32;
  Operands o;
  fill(o.hidden, o.hidden16, tokens * dim, bench_hidden(request.dtype), narrow);
  fill(o.classifier, o.classifier16, vocab * dim, bench_classifier(request.shape, request.dtype), narrow);
  o.targets = bench_targets(request.shape);
  o.d_hidden.assign(o.hidden.size(), 1.0F);
  o.d_classifier.assign(o.classifier.size(), 1.0F);
  return o;
}

void run_logitless(const Context& context, const BenchRequest& request, Operands& o, BenchResult& result) {
  const bool f32 = request.dtype == LOGITLESS_F32;
  float loss = 0;
  Buffers buffers;
  buffers.hidden = f32 ? static_cast<const void*>(o.hidden.data()) : o.hidden16.data();
  buffers.classifier = f32 ? static_cast<const void*>(o.classifier.data()) : o.classifier16.data();
  buffers.targets = o.targets.data();
  buffers.loss = &loss;
  if (result.gradients) {
    buffers.d_hidden = o.d_hidden.data();
    buffers.d_classifier = o.d_classifier.data();
  }
  const PlanInfo info = run_once(context, bench_problem(request, result), buffers);
  result.loss = static_cast<double>(loss);
  describe_plan(info, result);
}

void run_materialized(const BenchRequest& request, Operands& o, int threads, BenchResult& result) {
  const bool gradients = result.gradients;
  result.loss = materialized_loss(request.shape, o.hidden.data(), o.classifier.data(), o.targets.data(),
                                  gradients ? o.d_hidden.data() : nullptr,
                                  gradients ? o.d_classifier.data() : nullptr, threads);
  result.workspace_bytes = request.shape.tokens * (request.shape.vocab * static_cast<int64_t>(sizeof(float)) +
                                                   static_cast<int64_t>(sizeof(double)));
  result.detail = "fp32 logits in memory, " + materialized_by();
}

}  // namespace

std::string BenchShape::text() const {
  return std::to_string(tokens) + " x " + std::to_string(vocab) + " x " + std::to_string(dim);
}

double BenchResult::median_seconds() const {
  if (seconds.empty()) return NAN;
  std::vector<double> sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

Problem bench_problem(const BenchRequest& request, const BenchResult& method) {
  Problem problem;
  problem.tokens = request.shape.tokens;
  problem.vocab = request.shape.vocab;
  problem.hidden = request.shape.dim;
  problem.hidden_dtype = problem.classifier_dtype = request.dtype;
  problem.target_dtype = LOGITLESS_I32;
  // The gradients have the operands' dtype, in the same memory for all.
  problem.d_hidden_dtype = problem.d_classifier_dtype = request.dtype;
  if (method.gradients) {
    problem.pass = LOGITLESS_FORWARD_BACKWARD;
    problem.want_d_hidden = problem.want_d_classifier = 1;
  }
  problem.max_workspace_bytes = *method.budget_bytes;
  if (method.threshold) set_gradient(problem, Gradient::thinned, *method.threshold);
  return problem;
}

std::vector<BenchResult> bench_methods(const BenchRequest& request, bool materialized) {
  std::vector<BenchResult> methods;
  for (const bool gradients : {false, true}) {
    BenchResult method;
    method.gradients = gradients;
    if (materialized) {
      method.method = "materialized";
      methods.push_back(method);
    }
    for (const size_t budget : request.budgets) {
      method.budget_bytes = budget;
      method.method = budget == 0 ? "logitless, no budget"
                      : budget == LOGITLESS_FASTEST
                          ? "logitless, fastest"
                          : "logitless, " + format_bytes(static_cast<double>(budget));
      methods.push_back(method);
    }
    method.budget_bytes = 0;
    for (const double threshold : request.thresholds) {
      if (!gradients) continue;
      method.threshold = threshold;
      method.method = "logitless, thinned " + format_number(threshold, 3);
      methods.push_back(method);
    }
  }
  return methods;
}

void describe_plan(const PlanInfo& info, BenchResult& result) {
  result.workspace_bytes = static_cast<int64_t>(info.workspace_bytes);
  result.detail = std::string(logitless_plan_kind_name(static_cast<logitless_plan_kind>(info.kind))) + ", " +
                  info.backend + " " + info.config;
}

std::vector<BenchResult> run_bench(const GlobalOptions& globals, const BenchRequest& request,
                                   const std::function<void(const std::string&)>& step) {
  const Context context = make_context(globals);
  Operands operands = make_operands(request);
  std::vector<BenchResult> results = bench_methods(request, why_not_materialized().empty());
  for (int repeat = 0; repeat < request.repeats; ++repeat) {
    for (BenchResult& result : results) {
      if (!result.refusal.empty()) continue;
      release_free_memory();
      reset_peak_resident_bytes();
      const int64_t before = peak_resident_bytes();
      const auto start = std::chrono::steady_clock::now();
      try {
        if (result.budget_bytes) {
          run_logitless(context, request, operands, result);
        } else {
          run_materialized(request, operands, globals.threads, result);
        }
      } catch (const Error& error) {
        if (error.status() != LOGITLESS_BUDGET_TOO_SMALL) throw;
        result.refusal = error.what();
      } catch (const std::bad_alloc&) {
        result.refusal = "not enough memory";
      }
      if (result.refusal.empty()) {
        result.seconds.push_back(
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        result.peak_extra_bytes =
            std::max(result.peak_extra_bytes.value_or(0), peak_resident_bytes() - before);
      }
      step(request.shape.text() + ", " + result.method);
    }
  }
  return results;
}

}  // namespace logitless::cli
