#include "run.h"

#include "backends.h"
#include "core/status.h"
#include "core/targets.h"
#include "core/validate.h"

namespace headroom {

std::vector<Plan> list_plans(const Context& context, const Problem& problem, size_t max_workspace_bytes,
                             const Backend** backend) {
  const Problem valid = validated(problem);
  *backend = &choose_backend(context.backend, valid, context.options);
  return (*backend)->plans(valid, context.options, max_workspace_bytes);
}

PlannedProblem make_plan(const Context& context, const Problem& problem, size_t max_workspace_bytes) {
  const Problem valid = validated(problem);
  const Backend& backend = choose_backend(context.backend, valid, context.options);
  const std::vector<Plan> plans = backend.plans(valid, context.options, max_workspace_bytes);
  return {valid, &backend, context.options, choose_plan(plans, max_workspace_bytes)};
}

void run(const PlannedProblem& planned, const Buffers& buffers, void* workspace, size_t workspace_bytes) {
  const Buffers valid = validated(planned.problem, buffers);
  if (workspace_bytes < planned.plan.workspace_bytes) {
    throw_invalid("workspace_bytes", "at least " + std::to_string(planned.plan.workspace_bytes),
                  std::to_string(workspace_bytes));
  }
  if (planned.plan.workspace_bytes > 0 && workspace == nullptr)
    throw_invalid("workspace", "a pointer", "null");
  if (reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
    throw_invalid(
        "workspace", "64-byte alignment",
        "a pointer off by " + std::to_string(reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment));
  }
  check_targets(planned.problem, valid.targets);
  planned.backend->run(planned.problem, planned.plan, valid, Workspace(workspace), planned.options);
}

}  // namespace headroom
