#include "core/plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/number_text.h"
#include "core/status.h"

namespace headroom {
namespace {

// "27050240 bytes (25.8 MiB)", rounded up: so many MiB are enough.
std::string bytes_text(uint64_t bytes) {
  std::string text = std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  if (bytes < 1024) return text;
  const bool is_small = bytes < 1024 * 1024;
  const double size = static_cast<double>(bytes) / (is_small ? 1024.0 : 1024.0 * 1024.0);
  return text + " (" + fixed_text(std::ceil(10 * size) / 10, 1) + (is_small ? " KiB)" : " MiB)");
}

}  // namespace

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
    const auto rank = [](const Plan& p) {
      return std::pair(p.predicted_seconds * p.handicap, p.workspace_bytes);
    };
    if (best == nullptr || rank(plan) < rank(*best)) best = &plan;
  }
  if (best != nullptr) return *best;
  throw Error(Status::kBudgetTooSmall, "max_workspace_bytes: expected at least " +
                                           bytes_text(smallest->workspace_bytes) +
                                           " for this problem (plan " + plan_kind_name(smallest->kind) +
                                           "), got " + bytes_text(max_workspace_bytes));
}

}  // namespace headroom
