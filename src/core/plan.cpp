#include "core/plan.h"

#include <algorithm>

#include "core/status.h"

namespace headroom {

const char* plan_kind_name(PlanKind kind) {
  switch (kind) {
    case PlanKind::kForward:
      return "forward";
    case PlanKind::kWhole:
      return "whole";
    case PlanKind::kTokenChunks:
      return "token_chunks";
    case PlanKind::kVocabChunks:
      return "vocab_chunks";
    case PlanKind::kBackward:
      return "backward";
    case PlanKind::kThinned:
      return "thinned";
  }
  return "unknown plan";
}

const Plan& choose_plan(const std::vector<Plan>& candidates, uint64_t max_workspace_bytes) {
  if (candidates.empty()) throw Error(Status::kInternal, "the backend offered no plan for the problem");
  const Plan* best = nullptr;
  const Plan* smallest = &candidates.front();
  for (const Plan& plan : candidates) {
    if (plan.workspace_bytes < smallest->workspace_bytes) smallest = &plan;
    if (max_workspace_bytes != 0 && plan.workspace_bytes > max_workspace_bytes) continue;
    const bool faster =
        best == nullptr || plan.predicted_seconds < best->predicted_seconds ||
        (plan.predicted_seconds == best->predicted_seconds && plan.workspace_bytes < best->workspace_bytes);
    if (faster) best = &plan;
  }
  if (best != nullptr) return *best;
  throw Error(Status::kBudgetTooSmall, "max_workspace_bytes: expected at least " +
                                           std::to_string(smallest->workspace_bytes) +
                                           " for this problem (plan " + plan_kind_name(smallest->kind) +
                                           "), got " + std::to_string(max_workspace_bytes));
}

}  // namespace headroom
