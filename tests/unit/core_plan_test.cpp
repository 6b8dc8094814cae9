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

// A head whose default has 100 bytes beside the constant part; all have these more.
Plan by_default(std::vector<Plan> plans, std::vector<Plan> within = {}) {
  Problem problem;
  problem.tokens = 10;
  problem.vocab = 10;
  for (std::vector<Plan>* list : {&plans, &within}) {
    for (Plan& p : *list) p.workspace_bytes += kExtra;
  }
  const auto source = [&](uint64_t budget) {
    if (budget == 0) return plans;
    EXPECT_EQ(budget, default_bytes(problem));
    return within.empty() ? plans : within;
  };
  Plan chosen = chosen_plan(problem, source, 0);
  chosen.workspace_bytes -= kExtra;
  return chosen;
}

TEST(Plan, ByDefaultTheSmallestNearTheFastest) {
  const auto p = [](size_t bytes, double seconds) { return plan(PlanKind::kWhole, bytes, seconds); };
  const Plan chosen = by_default({p(90, 1), p(50, 1.02), p(40, 1.029), p(30, 1.031), p(10, 2)});
  EXPECT_EQ(chosen.workspace_bytes, 40u);
  EXPECT_EQ(chosen.choice, "the smallest within 3% of the fastest");
  EXPECT_EQ(by_default({p(90, 1)}).workspace_bytes, 90u);
}

// A rounding must gain its time by default, too, unless nothing else keeps to the default's bytes.
TEST(Plan, ByDefaultFewRoundings) {
  Plan rounds = plan(PlanKind::kTokenChunks, 40, 1.01);
  rounds.handicap = 1.04;
  EXPECT_EQ(by_default({plan(PlanKind::kWhole, 90, 1), rounds}).workspace_bytes, 90u);
  EXPECT_EQ(by_default({plan(PlanKind::kWhole, 190, 1), rounds}).workspace_bytes, 40u);
  Plan little_scratch = plan(PlanKind::kTokenChunks, 40, 1.01);
  little_scratch.default_handicap = kFastEnough;
  EXPECT_EQ(by_default({plan(PlanKind::kWhole, 90, 1), little_scratch}).workspace_bytes, 90u);
  EXPECT_EQ(by_default({plan(PlanKind::kWhole, 190, 1), little_scratch}).workspace_bytes, 40u);
  EXPECT_EQ(by_default({plan(PlanKind::kWhole, 190, 1), little_scratch, rounds}).choice,
            "within a quarter of the float32 logits + 64 MiB, at most 6% slower than the fastest");
}

TEST(Plan, ByDefaultNoMoreThanAQuarterOfTheLogitsWhileThatCostsLittle) {
  const auto p = [](size_t bytes, double seconds) { return plan(PlanKind::kWhole, bytes, seconds); };
  EXPECT_EQ(by_default({p(200, 1), p(100, 1.059), p(60, 1.0595)}).workspace_bytes, 100u);
  EXPECT_EQ(by_default({p(200, 1), p(101, 1.02), p(60, 1.05)}).workspace_bytes, 60u);
  EXPECT_EQ(by_default({p(200, 1), p(101, 1.02), p(60, 1.061)}).workspace_bytes, 101u);
  EXPECT_EQ(by_default({p(200, 1), p(60, 1.061)}, {p(70, 1.05), p(60, 1.061)}).workspace_bytes, 70u);
}

TEST(Plan, TheFastestWhenAskedFor) {
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

TEST(Plan, ARefusalNamesTheSmallestBudget) {
  try {
    choose_plan(kPlans, 99);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kBudgetTooSmall);
    EXPECT_STREQ(
        error.what(),
        "max_workspace_bytes: expected at least 100 bytes for this problem (plan vocab_chunks), got 99 "
        "bytes");
  }
}

TEST(Plan, BytesOfARefusalAreRoundedUp) {
  try {
    choose_plan({plan(PlanKind::kWhole, 27050240, 1)}, 1 << 10);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "max_workspace_bytes: expected at least 27050240 bytes (25.8 MiB) for this problem (plan whole), "
        "got 1024 bytes (1.0 KiB)");
  }
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
