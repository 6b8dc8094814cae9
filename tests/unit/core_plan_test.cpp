#include "core/plan.h"

#include <gtest/gtest.h>

#include "core/status.h"
#include "core/workspace.h"

namespace logitless {
namespace {

Plan plan(PlanKind kind, size_t bytes, double seconds) {
  Plan p;
  p.kind = kind;
  p.workspace_bytes = bytes;
  p.predicted_seconds = seconds;
  return p;
}

const std::vector<Plan> kPlans = {plan(PlanKind::kVocabChunks, 100, 4), plan(PlanKind::kWhole, 1000, 2),
                                  plan(PlanKind::kTokenChunks, 500, 3)};

TEST(Plan, TheFastestWithinTheBudget) {
  EXPECT_EQ(choose_plan(kPlans, 0).kind, PlanKind::kWhole);
  EXPECT_EQ(choose_plan(kPlans, 1000).kind, PlanKind::kWhole);
  EXPECT_EQ(choose_plan(kPlans, 999).kind, PlanKind::kTokenChunks);
  EXPECT_EQ(choose_plan(kPlans, 499).kind, PlanKind::kVocabChunks);
  EXPECT_EQ(choose_plan(kPlans, 100).kind, PlanKind::kVocabChunks);
}

constexpr uint64_t kExtra = uint64_t{64} << 20;

Plan whole(size_t bytes, double seconds) {
  return plan(PlanKind::kWhole, bytes, seconds);
}

// A rounding must gain its time by default as well. Little scratch is for tight budgets, unless no other plan
// keeps to the default's bytes.
Plan rounds(size_t bytes, double seconds) {
  Plan p = whole(bytes, seconds);
  p.rounding_penalty = 1.04;
  return p;
}
Plan little_scratch(size_t bytes, double seconds) {
  Plan p = whole(bytes, seconds);
  p.default_penalty = kFastEnough;
  return p;
}

constexpr const char* kNear = "the smallest within 3% of the fastest";
constexpr const char* kWithin =
    "within a quarter of the float32 logits + 64 MiB, at most 6% slower than the fastest";

// The choice for a head whose default plan has 100 bytes beside the constant part, which all plans have.
TEST(Plan, ByDefaultTheSmallestNearTheFastest) {
  struct Default {
    std::vector<Plan> plans;
    size_t bytes;
    const char* choice = nullptr;
    std::vector<Plan> within = {};  // the plans for the default's bytes, where these differ
  };
  const Default defaults[] = {
      {{whole(90, 1)}, 90},
      {{whole(90, 1), whole(50, 1.02), whole(40, 1.029), whole(30, 1.031), whole(10, 2)}, 40, kNear},
      {{whole(90, 1), rounds(40, 1.01)}, 90},
      {{whole(190, 1), rounds(40, 1.01)}, 40},
      {{whole(90, 1), little_scratch(40, 1.01)}, 90},
      {{whole(190, 1), little_scratch(40, 1.01)}, 40},
      {{whole(190, 1), little_scratch(40, 1.01), rounds(40, 1.01)}, 40, kWithin},
      {{whole(200, 1), whole(100, 1.059), whole(60, 1.0595)}, 100},
      {{whole(200, 1), whole(101, 1.02), whole(60, 1.05)}, 60},
      {{whole(200, 1), whole(101, 1.02), whole(60, 1.061)}, 101},
      {{whole(200, 1), whole(60, 1.061)}, 70, kWithin, {whole(70, 1.05), whole(60, 1.061)}}};
  for (const Default& each : defaults) {
    SCOPED_TRACE(&each - defaults);
    Problem problem;
    problem.tokens = problem.vocab = 10;
    const Plan chosen = chosen_plan(
        problem,
        [&](uint64_t budget) {
          EXPECT_TRUE(budget == 0 || budget == default_bytes(problem));
          std::vector<Plan> plans = budget == 0 || each.within.empty() ? each.plans : each.within;
          for (Plan& p : plans) p.workspace_bytes += kExtra;
          return plans;
        },
        0);
    EXPECT_EQ(chosen.workspace_bytes, each.bytes + kExtra);
    if (each.choice != nullptr) {
      EXPECT_EQ(chosen.choice, each.choice);
    }
  }
}

TEST(Plan, TheFastestWhenChosen) {
  std::vector<uint64_t> budgets;
  const auto source = [&](uint64_t budget) {
    budgets.push_back(budget);
    return kPlans;
  };
  EXPECT_EQ(chosen_plan({}, source, kFastest).kind, PlanKind::kWhole);
  EXPECT_EQ(chosen_plan({}, source, kFastest).choice, "the fastest");
  EXPECT_EQ(budgets, (std::vector<uint64_t>{0, 0}));
  EXPECT_EQ(chosen_plan({}, source, 500).choice, "the fastest within the budget");
  EXPECT_EQ(budgets.back(), 500u);
}

// A group plans by the largest shard, whatever the rank has.
TEST(Plan, RanksHaveTheSameDefault) {
  Problem problem;
  problem.tokens = 1000;
  problem.vocab = 7;
  EXPECT_EQ(default_bytes(problem), 7000 + kExtra);
  problem.group_size = 2;
  problem.group_vocab = 50;
  EXPECT_EQ(default_bytes(problem), 50000 + kExtra);
  problem.tokens = problem.group_vocab = INT64_MAX;
  EXPECT_EQ(default_bytes(problem), kFastest);
}

TEST(Plan, TheSmallerOfEquallyFast) {
  EXPECT_EQ(
      choose_plan({plan(PlanKind::kWhole, 9, 1), plan(PlanKind::kTokenChunks, 8, 1)}, 0).workspace_bytes, 8u);
}

TEST(Plan, ARefusalNamesTheSmallestBudgetRoundedUp) {
  const auto refusal = [](const std::vector<Plan>& plans, size_t budget) -> std::string {
    try {
      choose_plan(plans, budget);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kBudgetTooSmall);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(kPlans, 99),
            "max_workspace_bytes: expected at least 100 bytes for this problem (plan vocab_chunks), got 99 "
            "bytes");
  EXPECT_EQ(refusal({whole(27050240, 1)}, 1 << 10),
            "max_workspace_bytes: expected at least 27050240 bytes (25.8 MiB) for this problem (plan whole), "
            "got 1024 bytes (1.0 KiB)");
}

TEST(Plan, NoPlanAtAllIsABug) {
  EXPECT_THROW(choose_plan({}, 0), Error);
}

TEST(Workspace, CountsWhatItTakes) {
  const auto lay_out = [](Workspace& w) {
    return std::pair{w.take<double>(3).data(), w.take<int32_t>(17).data()};
  };
  Workspace counter;
  EXPECT_EQ(lay_out(counter).first, nullptr);
  EXPECT_EQ(counter.used(), 64u + 128u);
  alignas(kWorkspaceAlignment) std::byte memory[192];
  Workspace workspace(memory);
  const auto [first, second] = lay_out(workspace);
  EXPECT_EQ(reinterpret_cast<std::byte*>(first), memory);
  EXPECT_EQ(reinterpret_cast<std::byte*>(second), memory + 64);
  EXPECT_EQ(workspace.used(), counter.used());
  EXPECT_TRUE(workspace.take<float>(0).empty());
  EXPECT_EQ(workspace.used(), counter.used());
}

}  // namespace
}  // namespace logitless
