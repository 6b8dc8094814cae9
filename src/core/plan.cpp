#include "core/plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "core/number_text.h"
#include "core/status.h"

namespace logitless {
namespace {

// Returns "27050240 bytes (25.8 MiB)", rounded up, so that this many MiB are enough.
std::string bytes_text(uint64_t bytes) {
  std::string text = std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
  if (bytes < 1024) return text;
  const bool is_small = bytes < 1024 * 1024;
  const double size = static_cast<double>(bytes) / (is_small ? 1024.0 : 1024.0 * 1024.0);
  return text + " (" + fixed_text(std::ceil(10 * size) / 10, 1) + (is_small ? " KiB)" : " MiB)");
}

}  // namespace

void throw_budget_too_small(uint64_t required, uint64_t max_workspace_bytes, const std::string& plan) {
  throw Error(Status::kBudgetTooSmall,
              ErrorInfo{.argument = "max_workspace_bytes",
                        .expected = "at least " + bytes_text(required) + " for this problem" + plan,
                        .got = bytes_text(max_workspace_bytes),
                        .required_bytes = required});
}

const char* plan_kind_name(PlanKind kind) {
  static constexpr const char* kNames[] = {"forward",      "whole",    "token_chunks",
                                           "vocab_chunks", "backward", "sparsified"};
  const auto number = static_cast<size_t>(kind);
  return number < std::size(kNames) ? kNames[number] : "unknown plan";
}

const Plan& choose_plan(const std::vector<Plan>& candidates, uint64_t max_workspace_bytes) {
  if (candidates.empty()) throw Error(Status::kInternal, "the backend offered no plan for the problem");
  const Plan* best = nullptr;
  const Plan* smallest = &candidates.front();
  for (const Plan& plan : candidates) {
    if (plan.counted_bytes() < smallest->counted_bytes()) smallest = &plan;
    if (max_workspace_bytes != 0 && plan.counted_bytes() > max_workspace_bytes) continue;
    const auto rank = [](const Plan& p) {
      return std::pair(p.predicted_seconds * p.rounding_penalty, p.counted_bytes());
    };
    if (best == nullptr || rank(plan) < rank(*best)) best = &plan;
  }
  if (best != nullptr) return *best;
  std::string plan = std::string(" (plan ") + plan_kind_name(smallest->kind);
  if (smallest->screen_weight_bytes > 0) {
    plan += ": a workspace of " + bytes_text(smallest->workspace_bytes) + " and a screen_weight of " +
            bytes_text(smallest->screen_weight_bytes);
  }
  throw_budget_too_small(smallest->counted_bytes(), max_workspace_bytes, plan + ")");
}

namespace {

constexpr uint64_t kDefaultExtra = uint64_t{64} << 20;

// A kept copy of the weight is the caller's wish. So it does not count where a plan is chosen by default.
uint64_t chosen_bytes(const Plan& plan) {
  return plan.counted_bytes() - plan.screen_weight_bytes;
}

double ranked_seconds(const Plan& plan) {
  return plan.predicted_seconds * plan.rounding_penalty * plan.default_penalty;
}

// Returns null if there is none.
const Plan* smallest_within(const std::vector<Plan>& plans, double seconds) {
  const Plan* smallest = nullptr;
  const auto rank = [](const Plan& p) { return std::pair(chosen_bytes(p), ranked_seconds(p)); };
  for (const Plan& plan : plans) {
    if (ranked_seconds(plan) > seconds) continue;
    if (smallest == nullptr || rank(plan) < rank(*smallest)) smallest = &plan;
  }
  return smallest;
}

const Plan* fastest_within(const std::vector<Plan>& plans, uint64_t bytes, double seconds) {
  const Plan* fastest = nullptr;
  const auto rank = [](const Plan& p) { return std::pair(ranked_seconds(p), chosen_bytes(p)); };
  for (const Plan& plan : plans) {
    if (chosen_bytes(plan) > bytes || plan.predicted_seconds > seconds) continue;
    if (fastest == nullptr || rank(plan) < rank(*fastest)) fastest = &plan;
  }
  return fastest;
}

Plan with_choice(const Plan& plan, const char* choice) {
  Plan chosen = plan;
  chosen.choice = choice;
  return chosen;
}

Plan default_plan(const PlansWithin& plans_within, uint64_t most) {
  const std::vector<Plan> plans = plans_within(0);
  const Plan& fastest = choose_plan(plans, 0);
  const Plan& smallest = *smallest_within(plans, kNearlyFastest * ranked_seconds(fastest));
  if (chosen_bytes(smallest) > most) {
    const double seconds = kFastEnough * fastest.predicted_seconds;
    const char* choice =
        "within a quarter of the float32 logits + 64 MiB, at most 6% slower than the fastest";
    if (const Plan* plan = fastest_within(plans, most, seconds)) return with_choice(*plan, choice);
    // A search within a budget tries other sizes.
    const std::vector<Plan> others = plans_within(most + smallest.screen_weight_bytes);
    if (const Plan* plan = fastest_within(others, most, seconds)) return with_choice(*plan, choice);
  }
  return with_choice(smallest, "the smallest within 3% of the fastest");
}

}  // namespace

uint64_t default_bytes(const Problem& problem) {
  const int64_t vocab = problem.in_group() ? problem.group_vocab : problem.vocab;
  const double logits = static_cast<double>(problem.tokens) * static_cast<double>(vocab);
  if (logits >= 0x1p62) return kFastest;
  return static_cast<uint64_t>(problem.tokens) * static_cast<uint64_t>(vocab) + kDefaultExtra;
}

Plan chosen_plan(const Problem& problem, const PlansWithin& plans, uint64_t max_workspace_bytes) {
  if (max_workspace_bytes == 0) return default_plan(plans, default_bytes(problem));
  if (max_workspace_bytes >= kFastest) return with_choice(choose_plan(plans(0), 0), "the fastest");
  return with_choice(choose_plan(plans(max_workspace_bytes), max_workspace_bytes),
                     "the fastest within the budget");
}

}  // namespace logitless
