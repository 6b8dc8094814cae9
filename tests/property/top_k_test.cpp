// The largest logits of each row, compared with a sort of all logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine_test.h"

namespace logitless_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class TopK : public EngineTest {
 protected:
  // A case without a bias, because products alone make ties.
  Case plain(uint64_t seed, PlainSize size, int64_t k) const {
    Case c = EngineTest::plain(seed, size);
    c.mode = Mode::kForward;
    remove_bias(&c);
    c.problem.has.argmax = 1;
    c.problem.top_k = k;
    return c;
  }

  // A case whose logits are the bias alone, the same in every row.
  Case of_bias(const std::vector<double>& logits, int64_t tokens, int64_t k) const {
    Case c = plain(1, {tokens, static_cast<int64_t>(logits.size()), 8}, k);
    c.problem.has.bias = 1;
    c.problem.dtype.bias = LOGITLESS_F32;
    c.bias = logits;
    std::fill(c.hidden.begin(), c.hidden.end(), 0.0);
    return c;
  }

  static std::vector<double> row_of(const std::vector<double>& values, int64_t row, int64_t k) {
    const auto first = values.begin() + row * k;
    return {first, first + k};
  }

  void expect_ids(const std::vector<double>& logits, int64_t tokens, int64_t k) const {
    const Case c = of_bias(logits, tokens, k);
    const Outputs got = solve(c);
    const std::vector<double> expected = largest_ids(logits, k);
    for (int64_t row = 0; row < tokens; ++row) {
      EXPECT_EQ(row_of(got.top_ids, row, k), expected) << "row " << row;
      EXPECT_EQ(got.argmax[static_cast<size_t>(row)], expected[0]) << "row " << row;
    }
  }
};

TEST_P(TopK, AgreesWithASortOfAllLogits) {
  const PlainSize sizes[] = {{1, 1, 1},       {3, 7, 5},      {17, 449, 24},
                             {130, 1031, 40}, {65, 4999, 16}, {257, 700, 64}};
  for (const PlainSize& size : sizes) {
    for (const int64_t k : {1, 2, 8, 63, 64}) {
      if (k > size.vocab) continue;
      const Case c = plain(static_cast<uint64_t>(size.vocab + k), size, k);
      expect_truth(c);
    }
  }
}

TEST_P(TopK, LargeVocabularySlow) {
  for (const int64_t k : {1, 8, 64}) {
    const Case c = plain(static_cast<uint64_t>(k), {40, 30'011, 32}, k);
    expect_truth(c);
  }
}

TEST_P(TopK, AllOfASmallVocabulary) {
  const Case c = plain(5, {9, 61, 12}, 61);
  const Outputs got = solve(c);
  Expected(c).check(engine(), got);
  for (int64_t row = 0; row < 9; ++row) {
    const std::vector<double> log_probs = row_of(got.top_log_probs, row, 61);
    double sum = 0;
    for (const double log_p : log_probs) sum += std::exp(log_p);
    EXPECT_NEAR(sum, 1, 1e-5) << "row " << row;
  }
}

TEST_P(TopK, TheFirstIsTheArgmax) {
  Case c = plain(6, {300, 2103, 8}, 1);
  const Outputs one = solve(c);
  EXPECT_EQ(one.top_ids, one.argmax);
  c.problem.top_k = 64;
  const Outputs more = solve(c);
  for (int64_t row = 0; row < 300; ++row)
    EXPECT_EQ(row_of(more.top_ids, row, 64)[0], one.argmax[static_cast<size_t>(row)]);
}

TEST_P(TopK, MasksOfRows) {
  for (const PlainSize& size : {PlainSize{3, 7, 5}, PlainSize{17, 449, 24}, PlainSize{9, 4999, 16}}) {
    for (const double share : {0.0, 0.02, 0.5}) {
      Case c = plain(static_cast<uint64_t>(size.vocab), size, std::min<int64_t>(size.vocab, 8));
      mask_rows(&c, share);
      expect_truth(c);
    }
  }
}

TEST_P(TopK, AMaskOfAllColumnsChangesNothing) {
  Case c = plain(12, {40, 5000, 16}, 8);
  const Outputs without = solve(c);
  mask_rows(&c, 1);
  const Outputs with = solve(c);
  EXPECT_EQ(with.top_ids, without.top_ids);
  EXPECT_EQ(with.top_log_probs, without.top_log_probs);
}

// Columns that a mask leaves side by side are few of a sample, and many.
TEST_P(TopK, MasksOfRangesInEveryPlan) {
  Case c = plain(13, {12, 9000, 16}, 16);
  for (size_t row = 0; row < 12; row += 5) c.targets[row] = c.problem.ignore_index;
  mask_rows(&c, 0);
  for (int64_t row = 0; row < 12; ++row) {
    const auto first = c.sample_mask.begin() + row * 9000 + row * 20;
    std::fill(first, first + row * 500, 1);
  }
  expect_truth(c);
  const Outputs got = solve(c);
  for (const size_t bytes : plan_bytes(pass_problem(c, logitless::Pass::forward))) {
    EXPECT_EQ(solve(c, bytes).top_ids, got.top_ids) << bytes;
  }
}

TEST_P(TopK, EqualLogitsGiveTheSmallerIds) {
  for (const int64_t vocab : {64, 1000, 30'000}) {
    for (const int64_t k : {1, 8, 64}) {
      expect_ids(std::vector<double>(static_cast<size_t>(vocab), 0.5), 5, k);
    }
  }
  std::vector<double> levels(30'000);
  for (size_t j = 0; j < levels.size(); ++j) levels[j] = static_cast<double>((j * 7919) % 37);
  expect_ids(levels, 3, 64);
  expect_ids({-1, 0.0, -0.0, 0.0, -0.0, -2}, 2, 6);
}

TEST_P(TopK, SortedLogits) {
  std::vector<double> rising(30'000);
  for (size_t j = 0; j < rising.size(); ++j) rising[j] = static_cast<double>(j) / 1024;
  expect_ids(rising, 3, 64);
  std::reverse(rising.begin(), rising.end());
  expect_ids(rising, 3, 64);
}

// Covers more equal rows than a list of candidates has room for.
TEST_P(TopK, RepeatedRowsOfTheWeight) {
  for (const PlainSize& size : {PlainSize{33, 3000, 16}, PlainSize{5, 30'000, 16}}) {
    Case c = plain(8, size, 64);
    for (size_t j = 10 * 16; j < c.weight.size(); ++j) c.weight[j] = c.weight[j - 10 * 16];
    const Outputs got = solve(c);
    for (int64_t row = 0; row < size.tokens; ++row) {
      const std::vector<double> ids = row_of(got.top_ids, row, 64);
      for (size_t r = 0; r < 64; ++r) {
        EXPECT_EQ(ids[r], std::fmod(ids[0], 10) + 10 * static_cast<double>(r));
      }
      EXPECT_EQ(ids[0], got.argmax[static_cast<size_t>(row)]);
    }
  }
}

TEST_P(TopK, NaNBeforeInfinityBeforeNumbers) {
  std::vector<double> logits(5000);
  for (size_t j = 0; j < logits.size(); ++j) logits[j] = static_cast<double>((j * 7919) % 5000) / 64;
  logits[4999] = logits[17] = kNaN;
  logits[300] = logits[4000] = kInfinity;
  logits[3] = -kInfinity;
  expect_ids(logits, 4, 8);
  const Outputs got = solve(of_bias(logits, 4, 8));
  for (const double log_p : got.top_log_probs) EXPECT_TRUE(std::isnan(log_p));
  expect_ids(std::vector<double>(5000, kNaN), 2, 64);
  expect_ids(std::vector<double>(5000, kInfinity), 2, 64);
  expect_ids(std::vector<double>(5000, -kInfinity), 2, 64);
}

// Fewer unmasked columns than k: masked ones have probability 0.
TEST_P(TopK, MaskedColumns) {
  for (const int64_t vocab : {100, 5000}) {
    std::vector<double> logits(static_cast<size_t>(vocab), -kInfinity);
    logits[7] = 1;
    logits[static_cast<size_t>(vocab - 2)] = 2;
    logits[static_cast<size_t>(vocab / 2)] = 1;
    expect_ids(logits, 3, 8);
    const Outputs got = solve(of_bias(logits, 3, 8));
    for (int64_t row = 0; row < 3; ++row) {
      const std::vector<double> log_probs = row_of(got.top_log_probs, row, 8);
      for (size_t r = 0; r < 8; ++r) EXPECT_EQ(log_probs[r] == -kInfinity, r >= 3);
      EXPECT_NEAR(log_probs[1], 1 - std::log(std::exp(2.0) + 2 * std::exp(1.0)), 1e-5);
    }
  }
}

TEST_P(TopK, IgnoredRows) {
  for (const int64_t vocab : {500, 2500}) {
    Case c = plain(9, {300, vocab, 16}, 5);
    for (size_t row = 0; row < 300; ++row) {
      if (row < 140 || row % 3 == 0) c.targets[row] = c.problem.ignore_index;
    }
    const Expected expected(c);
    expected.check(engine(), solve(c));
    std::fill(c.targets.begin(), c.targets.end(), c.problem.ignore_index);
    const Outputs got = solve(c);
    EXPECT_EQ(got.top_ids, std::vector<double>(1500, -1));
    EXPECT_EQ(got.top_log_probs, std::vector<double>(1500, 0));
  }
}

// The pass has the losses of one without.
TEST_P(TopK, ChangesNoLoss) {
  Case c = plain(11, {100, 700, 24}, 8);
  const Outputs with = solve(c);
  c.problem.top_k = 0;
  const Outputs without = solve(c);
  expect_same_results(c, with, without, bounds_of(c));
}

LOGITLESS_TEST_ON(TopK, engines());

}  // namespace
}  // namespace logitless_test
