#include "reference/backend.h"

#include <algorithm>

#include "core/group_stats.h"
#include "reference/divergence.h"
#include "reference/reference.h"

namespace logitless {
namespace {

std::string why_unavailable(const BackendOptions&) {
  return "";
}
std::string describe(const BackendOptions&) {
  return "portable C++, float64 arithmetic, one thread per row";
}
std::string why_unsupported(const Problem&, const BackendOptions& options) {
  return options.on_host() ? "" : "the buffers are in the memory of a CUDA device";
}

PlanKind kind_of(const Problem& problem) {
  if (problem.is_thinned()) return PlanKind::kThinned;
  if (problem.pass == Pass::kForward) return PlanKind::kForward;
  return problem.pass == Pass::kBackward ? PlanKind::kBackward : PlanKind::kVocabChunks;
}

class ReferencePlan final : public BackendPlan {
 public:
  ReferencePlan(const Problem& problem, const ParallelFor& pool) : problem_(problem), pool_(pool) {}
  void run(const Buffers& buffers, Workspace workspace, void* /*stream*/,
           const Communicator* group) const override {
    reference::run(problem_, pool_.threads, buffers, workspace, pool_, group);
  }

 private:
  const Problem problem_;
  const ParallelFor pool_;
};

std::vector<Plan> plans(const Problem& problem, const BackendOptions& options, uint64_t) {
  Plan plan;
  plan.kind = kind_of(problem);
  plan.threads = options.parallel_for.threads;
  Workspace counter;
  reference::lay_out(problem, plan.threads, counter);
  plan.workspace_bytes = counter.used();
  if (problem.has.draws) plan.draws_bytes = kWorkspaceAlignment;  // the seed: draws are made again from it
  plan.cost_f = (problem.needs_forward() ? 1 : 0) + (problem.has.d_hidden ? 2 : 0) +
                (problem.has.d_classifier || problem.has.d_bias ? 2 : 0);
  constexpr double kFlopPerSecond = 1e9;  // a scalar loop; an order of magnitude is all that is needed
  plan.predicted_seconds = plan.cost_f * gemm_flop(problem) / kFlopPerSecond / plan.threads;
  plan.implementation = "scalar";
  plan.reason = problem.dtype.hidden == DType::kF64 ? "float64 operands" : "the reference was asked for";
  plan.config = "float64";
  count_gathers(problem, DType::kF64, std::max<int64_t>(problem.tokens, 1), &plan);
  plan.backend_plan = std::make_shared<ReferencePlan>(problem, options.parallel_for);
  return {plan};
}

}  // namespace

const Backend& reference_backend() {
  static const Backend kBackend{.name = "reference",
                                .device_memory = false,
                                .why_unavailable = why_unavailable,
                                .describe = describe,
                                .why_unsupported = why_unsupported,
                                .plans = plans,
                                .scale = scale_on_host,
                                .divergence = reference::divergence,
                                .devices = nullptr};
  return kBackend;
}

}  // namespace logitless
