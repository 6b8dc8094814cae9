#include "cuda/plan/plans.h"

#include <algorithm>
#include <utility>

#include "core/group_stats.h"
#include "core/status.h"
#include "core/workspace.h"
#include "cuda/plan/describe.h"
#include "cuda/run/bound_plan.h"
#include "cuda/run/sparsified/arena.h"

namespace logitless::cuda {
namespace {

std::vector<Plan> exact_plans(const Problem& problem, const Device& device, const std::string& requested,
                              uint64_t budget) {
  Problem exact = problem;
  exact.gradient = GradientMethod::kExact;
  exact.screen = Screen::kNone;
  exact.has.screen_weight = false;
  exact.screen_weight_bytes = 0;
  std::vector<Plan> plans = search_plans(exact, device, choose_engine(exact, device, requested), budget);
  for (Plan& plan : plans) {
    plan.reason += "; exact, because sparsified gradients of a flat softmax of these sizes may take longer";
  }
  return plans;
}

// Returns whether draws of a forward pass are worth keeping. It depends only on properties that both passes
// share, so that they agree: a switch may have been turned between them.
bool sparsification_gains(const Problem& problem, const Device& device) {
  Problem backward;
  backward.pass = Pass::kBackward;
  backward.tokens = problem.tokens;
  backward.vocab = problem.vocab;
  backward.hidden = problem.hidden;
  backward.dtype.hidden = backward.dtype.d_hidden = problem.dtype.hidden;
  backward.dtype.weight = backward.dtype.d_weight = problem.dtype.weight;
  backward.compute_dtype = problem.compute_dtype;
  backward.has.d_hidden = backward.has.d_weight = true;
  backward.gradient = GradientMethod::kSparsified;
  backward.has.saved = true;
  backward.threshold = problem.threshold;
  const auto seconds = [](const std::vector<Plan>& plans) { return choose_plan(plans, 0).predicted_seconds; };
  return seconds(search_plans(backward, device, choose_engine(backward, device, ""), 0)) <
         seconds(exact_plans(backward, device, "", 0));
}

// Adapts the plan for the group's largest shard to a rank's shard, so that all ranks have the same chunks of
// tokens. The shard may have fewer columns than would be kept, or than a window has. Partials and scratch do
// not depend on them.
PlanDetail of_shard(const Problem& shard, const Problem& largest, PlanDetail d) {
  d.vocab_window = std::min(d.vocab_window, std::max<int64_t>(shard.vocab, 1));
  d.cached_columns =
      d.cached_columns == largest.vocab ? shard.vocab : std::min(d.cached_columns, shard.vocab);
  d.relative_to_offset = d.relative_to_offset && shard.vocab > 0;
  return d;
}

// Returns plans for a whole vocabulary, or for a shard that a host merges.
std::vector<Plan> plans_of_one(const Problem& problem, const Device& device, const std::string& requested,
                               uint64_t budget) {
  std::vector<Plan> plans = search_plans(problem, device, choose_engine(problem, device, requested), budget);
  if (!problem.is_sparsified() || problem.gradient == GradientMethod::kAlwaysSparsified) return plans;
  // A loss alone is drawn for its screen only. Predictions are for a flat softmax, which a loss is seldom
  // asked of.
  if (problem.screens() && problem.pass == Pass::kForward) return plans;
  std::vector<Plan> exact = exact_plans(problem, device, requested, budget);
  if (problem.has.saved) return sparsification_gains(problem, device) ? plans : exact;
  plans.insert(plans.end(), exact.begin(), exact.end());
  return plans;
}

// Counts another gather: ranks that draw in the forward pass exchange their lse estimates as well.
void count_estimates(const Problem& problem, const PlanDetail& detail, Plan* plan) {
  if (!detail.is_sparsified() || !problem.needs_forward()) return;
  if (problem.group_size == 1 || problem.tokens == 0) return;
  plan->gathers += 1;
  plan->gathered_bytes += static_cast<uint64_t>(problem.group_size * problem.tokens) * sizeof(float);
}

// Returns the device without what is known of it alone, because all ranks must plan alike. Throws if that
// gives an engine which is not trusted on this device.
Device as_other_ranks(Device device, const Problem& problem, const std::string& requested) {
  const std::string untrusted = std::exchange(device.untrusted_engine, "");
  device.measured = {};
  if (choose_engine(problem, device, requested).engine->name() == untrusted) {
    throw Error(
        Status::kBackendUnavailable,
        "backend: expected an engine that all ranks can use, such as cuda:portable on each of them, got " +
            untrusted + ": " + device.why_untrusted);
  }
  return device;
}

std::vector<Plan> group_plans(const Problem& problem, const Device& device, const std::string& requested,
                              uint64_t budget) {
  Problem largest = problem;
  largest.vocab = problem.group_vocab;
  largest.vocab_start = 0;
  std::vector<Plan> plans = plans_of_one(largest, device, requested, budget);
  for (Plan& plan : plans) {
    const auto& planned = static_cast<const CudaPlan&>(*plan.backend_plan);
    Problem shard = planned.problem();  // its gradient may be exact although a sparsified one was requested
    shard.vocab = problem.vocab;
    shard.vocab_start = problem.vocab_start;
    const PlanDetail detail = of_shard(shard, largest, planned.detail());
    const PlanBytes bytes = bytes_of(shard, detail);
    if (bytes.workspace > plan.workspace_bytes || bytes.saved > plan.saved_bytes) {
      throw Error(Status::kInternal, "a shard needs more memory than the group's largest");
    }
    count_gathers(shard, DType::kF32, std::max<int64_t>(detail.token_chunk, 1), &plan);
    count_estimates(shard, detail, &plan);
    plan.backend_plan = std::make_shared<CudaPlan>(shard, detail, device);
  }
  return plans;
}

}  // namespace

std::vector<Plan> make_plans(const Problem& problem, const Device& device, const std::string& requested,
                             uint64_t max_workspace_bytes) {
  const auto plans = problem.in_group() ? group_plans : plans_of_one;
  // All passes on a shard plan alike, whether in a group or not: a backward pass may use a forward pass's
  // draws.
  if (problem.group_size > 1 || problem.is_shard()) {
    return plans(problem, as_other_ranks(device, problem, requested), requested, max_workspace_bytes);
  }
  return plans(problem, device, requested, max_workspace_bytes);
}

}  // namespace logitless::cuda
