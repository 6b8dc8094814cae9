// Plans of ranks that hold shards of one vocabulary, for a made-up device. All have the same chunks of
// tokens, none needs more memory than the largest shard, and every exchanged number has a place.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "head_plans.h"

namespace logitless::cuda {
namespace {

constexpr int64_t kTotal = 128000, kLargest = 64000;

struct Shard {
  int64_t start, rows;
};
constexpr Shard kShards[] = {{0, kLargest}, {kLargest, 50000}, {114000, 13999}, {127999, 1}, {128000, 0}};

Problem rank_problem(const Shard& shard, Pass pass, DType dtype, int64_t hidden) {
  Problem p = head_problem({8192, kLargest, hidden}, pass, dtype);
  p.vocab = shard.rows;
  p.vocab_start = shard.start;
  p.vocab_total = kTotal;
  p.group_size = 5;
  p.group_vocab = kLargest;
  return validated(p);
}

void expect_alike(Pass pass, DType dtype, int64_t hidden, const char* engine) {
  const auto plans_of = [&](const Shard& shard, size_t budget) {
    return make_plans(rank_problem(shard, pass, dtype, hidden), h200(), engine, budget);
  };
  std::set<size_t> budgets{0};
  for (const Plan& plan : plans_of(kShards[0], 0)) {
    for (const size_t part : {1, 2, 3, 5, 9}) budgets.insert(plan.workspace_bytes / part);
  }
  for (const size_t budget : budgets) {
    SCOPED_TRACE(budget);
    const std::vector<Plan> largest = plans_of(kShards[0], budget);
    for (const Shard& shard : kShards) {
      SCOPED_TRACE(shard.rows);
      const Problem p = rank_problem(shard, pass, dtype, hidden);
      const std::vector<Plan> plans = plans_of(shard, budget);
      ASSERT_EQ(plans.size(), largest.size());
      for (size_t i = 0; i < plans.size(); ++i) {
        const PlanDetail& d = detail_of(plans[i]);
        EXPECT_EQ(plans[i].kind, largest[i].kind);
        EXPECT_EQ(plans[i].token_chunk, largest[i].token_chunk);
        EXPECT_EQ(plans[i].gathers, largest[i].gathers);
        EXPECT_EQ(plans[i].gathered_bytes, largest[i].gathered_bytes);
        EXPECT_EQ(plans[i].workspace_bytes, largest[i].workspace_bytes);
        EXPECT_LE(bytes_of(p, d).workspace, plans[i].workspace_bytes);
        EXPECT_TRUE(d.cached_columns == 0 || d.cached_columns == shard.rows ||
                    d.cached_columns >= d.vocab_window);
        EXPECT_LE(d.cached_columns, shard.rows);
      }
    }
  }
}

TEST(CudaGroupPlans, RanksPlanAlike) {
  for (const char* engine : {"", "portable"}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      expect_alike(Pass::kForwardBackward, dtype, 2048, engine);
    }
    expect_alike(Pass::kForwardBackward, DType::kBF16, 1003, engine);  // rows are copied
    expect_alike(Pass::kForward, DType::kBF16, 2048, engine);
    expect_alike(Pass::kBackward, DType::kBF16, 2048, engine);
  }
}

TEST(CudaGroupPlans, ExchangesThreeNumbersARow) {
  const Problem p = rank_problem(kShards[0], Pass::kForwardBackward, DType::kBF16, 2048);
  const Plan plan = best(p);
  EXPECT_EQ(plan.gathers, (8192 + plan.token_chunk - 1) / plan.token_chunk);
  EXPECT_EQ(plan.gathered_bytes, static_cast<size_t>(5 * 4 * (3 * 8192 + 4 * plan.gathers)));
}

}  // namespace
}  // namespace logitless::cuda
