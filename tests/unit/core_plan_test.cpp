#include "core/plan.h"

#include <gtest/gtest.h>

#include "core/status.h"
#include "core/workspace.h"

namespace headroom {
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
}  // namespace headroom
