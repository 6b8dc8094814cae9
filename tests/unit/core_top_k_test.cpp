#include "core/top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace logitless {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<int64_t> ids_of(const std::vector<TopLogit<float>>& logits, size_t k) {
  std::vector<TopLogit<float>> best(k);
  int64_t count = 0;
  for (const TopLogit<float>& next : logits) count = insert_top<float>(best, count, next);
  EXPECT_EQ(count, static_cast<int64_t>(std::min(k, logits.size())));
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(best[static_cast<size_t>(i)].id);
  return ids;
}

TEST(TopK, OrdersNaNInfinityNumbersAndIds) {
  EXPECT_TRUE(is_better(2.0f, 5, 1.0f, 3));
  EXPECT_TRUE(is_better(1.0f, 3, 1.0f, 5));
  EXPECT_FALSE(is_better(1.0f, 5, 1.0f, 3));
  EXPECT_TRUE(is_better(-0.0f, 3, 0.0f, 5));
  EXPECT_TRUE(is_better(kNaN, 5, kInfinity, 3));
  EXPECT_FALSE(is_better(kInfinity, 3, kNaN, 5));
  EXPECT_TRUE(is_better(kNaN, 3, kNaN, 5));
  EXPECT_FALSE(is_better(kNaN, 5, kNaN, 3));
}

TEST(TopK, DoesNotDependOnTheOrderOfInsertions) {
  std::vector<TopLogit<float>> logits = {{1, 0},         {kNaN, 1}, {1, 2},   {-kInfinity, 3},
                                         {kInfinity, 4}, {2, 5},    {kNaN, 6}};
  const auto before = [](const auto& a, const auto& b) { return a.id < b.id; };
  do {
    EXPECT_EQ(ids_of(logits, 5), (std::vector<int64_t>{1, 6, 4, 5, 0}));
    EXPECT_EQ(ids_of(logits, 9), (std::vector<int64_t>{1, 6, 4, 5, 0, 2, 3}));
  } while (std::next_permutation(logits.begin(), logits.end(), before));
}

}  // namespace
}  // namespace logitless
