#include "core/row_stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "random.h"

namespace logitless {
namespace {

using Stats = RowStats<double>;

// Statistics of some columns, computed at once.
Stats of(const std::vector<double>& z, int64_t first, int64_t last) {
  Stats s;
  for (int64_t j = first; j < last; ++j) {
    const double value = z[static_cast<size_t>(j)];
    if (s.argmax < 0 || value > s.max) {
      s.max = value;
      s.argmax = j;
    }
  }
  for (int64_t j = first; j < last; ++j) {
    const double value = z[static_cast<size_t>(j)];
    s.sum_exp += std::exp(value - s.max);
    s.sum_offset += std::exp(value - s.max) * (value - s.max);
    s.weighted += static_cast<double>(j) * (value - s.max);
    s.weight += static_cast<double>(j);
    s.logit_sum += value;
    s.sum_sq += std::exp(2 * (value - s.max));
    if (j == 4) s.target_logit = value;
  }
  return s;
}

void expect_near(const Stats& a, const Stats& b) {
  EXPECT_EQ(a.max, b.max);
  EXPECT_EQ(a.argmax, b.argmax);
  EXPECT_EQ(a.target_logit, b.target_logit);
  EXPECT_NEAR(a.sum_exp, b.sum_exp, 1e-13 * b.sum_exp);
  EXPECT_NEAR(a.sum_offset, b.sum_offset, 1e-12 * (1 + std::fabs(b.max)) * b.sum_exp);
  EXPECT_NEAR(a.weighted, b.weighted, 1e-11);
  EXPECT_EQ(a.weight, b.weight);
  EXPECT_NEAR(a.logit_sum, b.logit_sum, 1e-12);
  EXPECT_NEAR(a.sum_sq, b.sum_sq, 1e-12 * b.sum_sq);
}

std::vector<double> logits(uint64_t seed) {
  logitless_test::Random random(seed);
  std::vector<double> z(10);
  for (double& value : z) value = 5 * random.normal();
  return z;
}

TEST(RowStats, MergeJoinsAnyTwoRanges) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto z = logits(seed);
    for (int64_t cut = 0; cut <= 10; ++cut) {
      expect_near(merge(of(z, 0, cut), of(z, cut, 10)), of(z, 0, 10));
      expect_near(merge(of(z, cut, 10), of(z, 0, cut)), of(z, 0, 10));
    }
  }
}

TEST(RowStats, MergeIsAssociative) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto z = logits(seed);
    const Stats a = of(z, 0, 3), b = of(z, 3, 5), c = of(z, 5, 10);
    expect_near(merge(merge(a, b), c), merge(a, merge(b, c)));
  }
}

TEST(RowStats, NoColumnsAreNeutral) {
  const Stats s = of(logits(1), 0, 10);
  for (const Stats& joined : {merge(s, Stats{}), merge(Stats{}, s)}) {
    EXPECT_EQ(joined.max, s.max);
    EXPECT_EQ(joined.sum_exp, s.sum_exp);
    EXPECT_EQ(joined.argmax, s.argmax);
    EXPECT_EQ(joined.sum_offset, s.sum_offset);
    EXPECT_EQ(joined.weighted, s.weighted);
  }
  const Stats none = merge(Stats{}, Stats{});
  EXPECT_EQ(none.max, -INFINITY);
  EXPECT_EQ(none.sum_exp, 0);
  EXPECT_EQ(none.argmax, -1);
}

TEST(RowStats, TheFirstOfEqualMaximaIsTheArgmax) {
  Stats a, b;
  a.max = b.max = 2;
  a.sum_exp = b.sum_exp = 1;
  a.argmax = 7;
  b.argmax = 3;
  EXPECT_EQ(merge(a, b).argmax, 3);
  EXPECT_EQ(merge(b, a).argmax, 3);
}

TEST(RowStats, ANaNIsNeverLost) {
  const Stats finite = of(logits(2), 0, 5);
  Stats bad;
  bad.max = bad.sum_exp = NAN;
  bad.argmax = 8;
  for (const Stats& joined : {merge(finite, bad), merge(bad, finite)}) {
    EXPECT_TRUE(std::isnan(joined.max));
    EXPECT_TRUE(std::isnan(log_sum_exp(joined)));
    EXPECT_EQ(joined.argmax, 8);
  }
  Stats earlier = bad;
  earlier.argmax = 6;
  EXPECT_EQ(merge(bad, earlier).argmax, 6);
  EXPECT_EQ(merge(earlier, bad).argmax, 6);
}

TEST(RowStats, MinusInfinityIsAnOrdinaryLogit) {
  Stats masked;
  masked.argmax = 0;  // one column of -inf: max -inf, no mass
  const Stats finite = of(logits(3), 1, 5);
  for (const Stats& joined : {merge(finite, masked), merge(masked, finite)}) {
    EXPECT_EQ(joined.max, finite.max);
    EXPECT_EQ(joined.sum_exp, finite.sum_exp);
    EXPECT_EQ(joined.argmax, finite.argmax);
    EXPECT_EQ(joined.sum_offset, finite.sum_offset);
  }
}

TEST(RowStats, RebaseKeepsWhatTheSumsMean) {
  const Stats s = of(logits(4), 0, 10);
  const Stats r = rebase(s, s.max + 3);
  EXPECT_NEAR(log_sum_exp(r), log_sum_exp(s), 1e-14 * std::fabs(log_sum_exp(s)));
  EXPECT_NEAR(r.sum_offset / r.sum_exp + 3, s.sum_offset / s.sum_exp, 1e-13);
  EXPECT_EQ(r.target_logit, s.target_logit);
  EXPECT_NEAR(r.weighted + 3 * r.weight, s.weighted, 1e-11);
  EXPECT_NEAR(told_sum(SumKind::kOffset, r.weighted, r), told_sum(SumKind::kOffset, s.weighted, s), 1e-11);
  EXPECT_EQ(r.logit_sum, s.logit_sum);
  EXPECT_NEAR(std::log(r.sum_sq) - 2 * std::log(r.sum_exp), std::log(s.sum_sq) - 2 * std::log(s.sum_exp),
              1e-13);
}

// No sum that is of differences loses a digit to what all logits have in common, in whatever parts it is
// made.
TEST(RowStats, ACommonOffsetChangesNoSumOfDifferences) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<double> z = logits(seed);
    for (double& each : z) each = std::round(each * 8) / 8;
    for (const double offset : {1e6, -1e15, 0x1p60}) {
      const double step = std::exp2(std::max(0, std::ilogb(offset) - 46));  // so that each logit is exact
      std::vector<double> near = z, far = z;
      for (size_t j = 0; j < z.size(); ++j) far[j] = (near[j] *= step) + offset;
      const Stats a = merge(merge(of(near, 0, 3), of(near, 3, 6)), of(near, 6, 10));
      const Stats b = merge(merge(of(far, 0, 3), of(far, 3, 6)), of(far, 6, 10));
      EXPECT_EQ(a.sum_exp, b.sum_exp);
      EXPECT_EQ(a.sum_offset, b.sum_offset);
      EXPECT_EQ(a.weighted, b.weighted);
    }
  }
}

// A sum of the logits themselves merges by itself, and masked columns have no part in what the others are
// relative to.
TEST(RowStats, AWeightedSumOfLogitsThemselves) {
  const auto z = logits(5);
  Stats told = of(z, 0, 4);
  told.weighted = told_sum(SumKind::kOffset, told.weighted, told);
  told.weight = 0;
  const Stats more = of(z, 4, 10), all = of(z, 0, 10);
  const Stats joined = merge(told, more);
  EXPECT_NEAR(told_sum(SumKind::kOffset, joined.weighted, joined),
              told_sum(SumKind::kOffset, all.weighted, all), 1e-11);
  Stats masked;
  masked.weighted = -INFINITY;
  masked.weight = 1;
  for (const Stats& each : {merge(masked, all), merge(all, masked)}) EXPECT_EQ(each.weighted, -INFINITY);
}

}  // namespace
}  // namespace logitless
