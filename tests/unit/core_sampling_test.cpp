// The random numbers of samples, and the order of packed keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/sampling.h"
#include "core/top_k.h"

namespace logitless {
namespace {

// chi^2 of counts, as standard deviations from its mean.
double deviation_of(const std::vector<int64_t>& counts, const std::vector<double>& probability) {
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  double chi_square = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = static_cast<double>(total) * probability[i];
    chi_square += std::pow(static_cast<double>(counts[i]) - expected, 2) / expected;
  }
  const auto degrees = static_cast<double>(counts.size() - 1);
  return (chi_square - degrees) / std::sqrt(2 * degrees);
}

// The place of the largest key of logits whose columns are `step` apart.
size_t winner(const std::vector<float>& z, SampleKey key, uint32_t step) {
  SampleRace race(key, 0);
  for (size_t j = 0; j < z.size(); ++j) race.add(z[j], static_cast<uint32_t>(j) * step);
  return column_of_packed(race.best) / step;
}

std::vector<double> softmax(const std::vector<float>& z) {
  std::vector<double> p;
  double sum = 0;
  for (const float each : z) sum += std::exp(double{each});
  for (const float each : z) p.push_back(std::exp(double{each}) / sum);
  return p;
}

// chi^2 has standard deviations; 5 of them are exceeded with a probability below 1e-5.
constexpr double kMost = 5;
constexpr uint64_t kDraws = 100'000;

TEST(Sampling, WinnersHaveTheProbabilitiesOfTheSoftmax) {
  const std::vector<float> equal(48, 0.0f);
  std::vector<float> falling;
  for (int j = 0; j < 12; ++j) falling.push_back(static_cast<float>(-0.5 * j));
  for (const auto& z : {equal, falling}) {
    for (const uint32_t step : {1u, 2u, 8u, 4096u, 5461u}) {  // 8: of the same groups
      std::vector<int64_t> of_seed(z.size()), of_row(z.size()), of_sample(z.size());
      for (uint64_t i = 0; i < kDraws; ++i) {
        ++of_seed[winner(z, sample_key(i, 3, 0), step)];
        ++of_row[winner(z, sample_key(step, i, 1), step)];
        ++of_sample[winner(z, sample_key(7, 5, i), step)];
      }
      for (const auto& counts : {of_seed, of_row, of_sample}) {
        EXPECT_LT(std::fabs(deviation_of(counts, softmax(z))), kMost) << "step " << step;
      }
    }
  }
}

// Pairs of winners whose keys differ by one in an argument fall into the cells of a square.
TEST(Sampling, NeighborsAreIndependent) {
  const std::vector<float> z(8, 0.0f);
  const std::vector<double> probability(64, 1.0 / 64);
  std::vector<int64_t> seeds(64), rows(64), samples(64), columns(64);
  for (uint64_t i = 0; i < kDraws; ++i) {
    const SampleKey key = sample_key(i, i % 10, 0);
    const size_t first = winner(z, key, 1);
    ++seeds[first * 8 + winner(z, sample_key(i + 1'000'000, i % 10, 0), 1)];
    ++rows[first * 8 + winner(z, sample_key(i, i % 10 + 10, 0), 1)];
    ++samples[first * 8 + winner(z, sample_key(i, i % 10, 1), 1)];
    SampleRace next(key, 0);
    for (uint32_t j = 0; j < 8; ++j) next.add(0, 8 + j);
    ++columns[first * 8 + column_of_packed(next.best) - 8];
  }
  for (const auto& counts : {seeds, rows, samples, columns}) {
    EXPECT_LT(std::fabs(deviation_of(counts, probability)), kMost);
  }
}

// The numbers of two columns of a group, and of two groups, are exponential and independent: each quarter of
// one meets each quarter of the other.
TEST(Sampling, ColumnsOfAGroupAreIndependent) {
  ASSERT_EQ(sample_group(1), sample_group(57));
  ASSERT_NE(sample_group(1), sample_group(3));
  const std::vector<double> probability(16, 1.0 / 16);
  const auto quarter = [](SampleKey key, uint32_t column) {
    const double v = -std::expm1(-std::exp(-double{sample_noise(key, column)}));
    return std::min<size_t>(3, static_cast<size_t>(4 * v));
  };
  for (const uint32_t other : {0u, 57u, 3u, 65u}) {
    std::vector<int64_t> counts(16);
    for (uint64_t i = 0; i < kDraws; ++i) {
      const SampleKey key = sample_key(i, 2, 0);
      ++counts[4 * quarter(key, 1) + quarter(key, other)];
    }
    EXPECT_LT(std::fabs(deviation_of(counts, probability)), kMost) << other;
  }
}

// A logit 22 nats below another wins with a probability of 2.8e-10. Over 2^20 such columns that is 2.9e-4,
// which noise of 23 or 32 bits could not give.
TEST(Sampling, ManyColumnsOfTinyProbabilities) {
  constexpr uint32_t kGroups = 1 << 16;
#ifdef LOGITLESS_TEST_SANITIZED  // which makes this loop 20 times as long
  constexpr int kRaces = 2'000;
#else
  constexpr int kRaces = 10'000;
#endif
  // Equal logits far below the first: the largest of their noises decides, as that of one column would. It is
  // in the group of the smallest v.
  int won = 0;
  double least = 0;
  for (int i = 0; i < kRaces; ++i) {
    const SampleKey key = sample_key(static_cast<uint64_t>(i), 0, 0);
    uint32_t smallest = UINT32_MAX, first = 0;
    for (uint32_t group = 1; group <= kGroups; ++group) {
      const uint32_t column = group / 4 * 64 + group % 4 * 2, high = SampleGroup(key, column).high;
      if (high < smallest) smallest = high, first = column;
    }
    float noise = -std::numeric_limits<float>::infinity();
    for (uint32_t place = 0; place < kSampleGroup; ++place) {
      noise = std::max(noise, sample_noise(key, first + place / 2 * 8 + place % 2));
    }
    // exp(-noise) times the number of columns is exponential.
    const double e = std::exp(-double{noise}) * kGroups * kSampleGroup;
    least += e;
    won += e < std::exp(-double{sample_noise(key, 0)});
  }
  EXPECT_NEAR(least / kRaces, 1, 5 / std::sqrt(kRaces));
  EXPECT_NEAR(won, kRaces / 2.0, 5 * std::sqrt(kRaces / 4.0));
}

TEST(Sampling, NoiseIsFiniteAtBothEnds) {
  // A key that makes the bits of column 0 all zeros does not occur; the extremes of E = -log(1 - v) do.
  double largest = -1, smallest = 1;
  for (uint64_t i = 0; i < 1'000'000; ++i) {
    const float noise = sample_noise(sample_key(i, 0, 0), 1);
    ASSERT_TRUE(std::isfinite(noise));
    largest = std::max(largest, double{noise});
    smallest = std::min(smallest, double{noise});
  }
  EXPECT_GT(largest, 11);     // log(1e6) = 13.8
  EXPECT_LT(smallest, -2.4);  // -log(log(1e6)) = -2.6
}

TEST(Sampling, PackedKeysAreInTheOrderOfTheLargestLogits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float keys[] = {std::nanf(""), -std::nanf(""), kInfinity, 3e38f,     1, 1e-40f, 0,
                        -0.0f,         -1e-40f,        -7,        -kInfinity};
  for (const float a : keys) {
    for (const float b : keys) {
      for (const uint32_t column : {0u, 1u, 4'000'000'000u}) {
        const bool better = is_better(a, int64_t{column}, b, int64_t{5});
        EXPECT_EQ(packed_sample(a, column) > packed_sample(b, 5), better) << a << " " << b << " " << column;
      }
    }
    EXPECT_GT(packed_sample(a, UINT32_MAX), 0);
    const float unpacked = key_of_packed(packed_sample(a, 9));
    EXPECT_TRUE(unpacked == a || (std::isnan(unpacked) && std::isnan(a)));
    EXPECT_EQ(column_of_packed(packed_sample(a, 9)), 9);
  }
  EXPECT_EQ(key_of_packed(0), -kInfinity);
}

// No logit that wins is left out by its upper bits.
TEST(Sampling, TheWinnerMayWin) {
  for (const float scale : {1.0f, 1e3f, 1e6f}) {
    for (uint64_t i = 0; i < 2'000; ++i) {
      const SampleKey key = sample_key(i, 1, 2);
      SampleRace all(key, 0), few(key, 0);
      for (uint32_t j = 0; j < 64; ++j) {
        const float z = scale * static_cast<float>(std::sin(static_cast<double>(i * 64 + j)));
        all.add(z, j);
        if (few.may_win(z, j)) few.add(z, j);
      }
      ASSERT_EQ(all.best, few.best) << scale << " " << i;
    }
  }
}

}  // namespace
}  // namespace logitless
