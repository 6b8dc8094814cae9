#include "cuda/run/float64/plans.h"

#include <algorithm>
#include <iterator>

#include "cuda/plan/sizes.h"
#include "cuda/run/float64/arena.h"
#include "cuda/run/float64/run.h"

namespace logitless::cuda::float64 {
namespace {

constexpr BlockSize kBlocks[] = {{1024, 2048}, {512, 1024}, {256, 512}, {128, 256}, {64, 64}};
static_assert(std::all_of(std::begin(kBlocks), std::end(kBlocks),
                          [](const BlockSize& size) { return size.columns % kStrip == 0; }));

constexpr double kFlopPerProcessor = 5e10;
constexpr double kLaunchSeconds = 4e-6;

// Each sweep of the gradients makes the logits again.
double cost_of(const Problem& p) {
  const double forward = p.needs_forward() ? 1 : 0;
  const bool sweeps_columns = p.has.d_classifier || p.has.d_bias;
  return forward + (p.has.d_hidden ? 2 : 0) + (sweeps_columns ? 1 : 0) + (p.has.d_classifier ? 1 : 0);
}

PlanKind kind_of(const Problem& p) {
  if (p.pass == Pass::kForward) return PlanKind::kForward;
  return p.pass == Pass::kBackward ? PlanKind::kBackward : PlanKind::kVocabChunks;
}

Plan plan_of(const Problem& p, const Device& device, const std::string& asked, const BlockSize& largest) {
  const int64_t tokens = std::max<int64_t>(p.tokens, 1);
  const BlockSize size{std::min(largest.rows, tokens), std::min(largest.columns, p.vocab)};
  Plan plan;
  plan.kind = kind_of(p);
  plan.token_chunk = size.rows;
  plan.vocab_window = size.columns;
  Workspace counter;
  lay_out(p, size, counter);
  plan.workspace_bytes = counter.used();
  plan.cost_f = cost_of(p);
  const auto blocks = static_cast<double>(ceil_div(tokens, size.rows) * ceil_div(p.vocab, size.columns));
  plan.predicted_seconds =
      plan.cost_f *
      (gemm_flop(p) / (kFlopPerProcessor * std::max(device.processors, 1)) + 2 * blocks * kLaunchSeconds);
  plan.implementation = "portable";
  plan.reason = asked.empty() ? "float64 operands" : "asked for";
  plan.config = "float64, blocks of " + std::to_string(size.rows) + " x " + std::to_string(size.columns);
  plan.backend_plan = std::make_shared<Float64Plan>(p, size, device.ordinal);
  return plan;
}

}  // namespace

std::vector<Plan> make_plans(const Problem& problem, const Device& device, const std::string& asked,
                             uint64_t max_workspace_bytes) {
  std::vector<Plan> plans;
  for (const BlockSize& largest : kBlocks) {
    Plan plan = plan_of(problem, device, asked, largest);
    if (!plans.empty() && plan.config == plans.back().config) continue;  // of a small problem
    plans.push_back(std::move(plan));
  }
  if (max_workspace_bytes == 0) return plans;
  // From the largest to the smallest, which stays in any case.
  const auto fits = [&](const Plan& plan) { return plan.workspace_bytes <= max_workspace_bytes; };
  plans.erase(plans.begin(), std::find_if(plans.begin(), plans.end() - 1, fits));
  return plans;
}

}  // namespace logitless::cuda::float64
