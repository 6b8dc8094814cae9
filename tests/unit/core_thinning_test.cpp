// The random numbers of thinned gradients, their weights, and the room of a row's list.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/thinning.h"

namespace logitless {
namespace {

// chi^2 of counts over equally likely cells, as standard deviations from its mean.
double deviation_of(const std::vector<int64_t>& counts) {
  double total = 0;
  for (int64_t count : counts) total += static_cast<double>(count);
  const double expected = total / static_cast<double>(counts.size());
  double chi_square = 0;
  for (int64_t count : counts) chi_square += std::pow(static_cast<double>(count) - expected, 2) / expected;
  const auto degrees = static_cast<double>(counts.size() - 1);
  return (chi_square - degrees) / std::sqrt(2 * degrees);
}

float uniform(uint64_t seed, uint32_t row, uint32_t stream) {
  return draw_uniform(draw_bits(seed, row, stream));
}

size_t cell(float u, size_t cells) {
  return static_cast<size_t>(u * static_cast<float>(cells));
}

TEST(Thinning, UniformsAreInsideTheInterval) {
  EXPECT_GT(draw_uniform(0), 0);
  EXPECT_LT(draw_uniform(UINT32_MAX), 1);
}

// Over each of the three arguments while the others stay.
TEST(Thinning, UniformInEveryArgument) {
  constexpr size_t kCells = 64;
  for (uint32_t fixed : {0u, 1u, 77u, kFirstDrawStream + 448}) {
    std::vector<int64_t> of_seed(kCells), of_row(kCells), of_stream(kCells), of_high_seed(kCells);
    for (uint32_t i = 0; i < 20'000; ++i) {
      ++of_seed[cell(uniform(i, 5, fixed), kCells)];
      ++of_high_seed[cell(uniform(uint64_t{i} << 32 | 3, 5, fixed), kCells)];
      ++of_row[cell(uniform(fixed, i, 9), kCells)];
      ++of_stream[cell(uniform(fixed, 3, i), kCells)];
    }
    for (const auto& counts : {of_seed, of_high_seed, of_row, of_stream}) {
      EXPECT_LT(std::fabs(deviation_of(counts)), 5) << fixed;
    }
  }
}

// Pairs of draws that differ by one in an argument fall evenly into the cells of a square.
TEST(Thinning, NeighborsAreIndependent) {
  constexpr size_t kSide = 16;
  std::vector<int64_t> seeds(kSide * kSide), rows(kSide * kSide), columns(kSide * kSide),
      draws(kSide * kSide);
  for (uint32_t i = 0; i < 60'000; ++i) {
    const uint32_t row = i % 300;
    const uint32_t column = i / 300;
    const size_t first = cell(uniform(7, row, column), kSide) * kSide;
    ++seeds[first + cell(uniform(8, row, column), kSide)];
    ++rows[first + cell(uniform(7, row + 1, column), kSide)];
    ++columns[first + cell(uniform(7, row, column + 1), kSide)];
    ++draws[first + cell(uniform(7, row, kFirstDrawStream + column), kSide)];
  }
  for (const auto& counts : {seeds, rows, columns, draws}) EXPECT_LT(std::fabs(deviation_of(counts)), 5);
}

// Both draws together: p below the threshold is kept with p / threshold at the threshold, whatever the guess.
TEST(Thinning, BothDrawsTogether) {
  constexpr float kThreshold = 0x1p-6f;
  constexpr int kDraws = 200'000;
  for (float p : {0.3f * kThreshold, 0.9f * kThreshold, 1.5f * kThreshold, 40 * kThreshold}) {
    for (float p_over_q : {0.05f, 0.5f, 1.0f, 1.7f}) {  // the last: a guess above lse
      const float first = std::min(1.0f, p / p_over_q / kThreshold);
      double sum = 0;
      double square = 0;
      for (uint32_t i = 0; i < kDraws; ++i) {
        if (uniform(3, i, kFirstDrawStream) >= first) continue;
        const double weight = thinned_weight(p, p_over_q, kThreshold, uniform(3, i, 17));
        sum += weight / kDraws;
        square += weight * weight / kDraws;
        if (p >= kThreshold && p_over_q <= 1) {
          EXPECT_EQ(static_cast<float>(weight), p);
        }
        if (p < kThreshold && p_over_q <= 1) {
          EXPECT_TRUE(weight == 0 || weight == static_cast<double>(kThreshold));
        }
      }
      const double error = std::sqrt(std::max(square - sum * sum, 0.0) / kDraws);
      EXPECT_NEAR(sum, p, 5 * error + 1e-6 * p) << p << " " << p_over_q;
    }
  }
}

// What a bound of lse leaves out, lse leaves out as well.
TEST(Thinning, EarlyDrawsKeepWhatLateOnesKeep) {
  constexpr float kThreshold = 0x1p-8f;
  for (uint32_t i = 0; i < 20'000; ++i) {
    const float z = -8 + 6 * uniform(1, i, 1);
    const float guess = 2 * uniform(1, i, 2) - 2;
    const float bound = guess + uniform(1, i, 3);
    const float lse = bound + uniform(1, i, 4);
    const float u = uniform(1, i, 5);
    const auto weight = [&](float at) {
      return thinned_weight(std::exp(z - at), std::exp(guess - at), kThreshold, u);
    };
    if (weight(lse) != 0) {
      EXPECT_NE(weight(bound), 0);
    }
  }
}

TEST(Thinning, NanIsKept) {
  EXPECT_TRUE(std::isnan(thinned_weight(NAN, NAN, 0.1f, 0.5f)));
}

TEST(Thinning, RowCapacity) {
  EXPECT_EQ(thinned_row_capacity(1e-30, 1000), 1000);
  EXPECT_EQ(thinned_row_capacity(1.0, 7), 7);
  EXPECT_EQ(thinned_row_capacity(0x1p-10, 131072), 1024 + 362 + 48);
  // The bound of its comment: exp(-64) for the mean 1 / threshold.
  for (double threshold : {1.0, 0.1, 0x1p-10, 0x1p-16}) {
    const double mean = 1 / threshold;
    const double t = static_cast<double>(thinned_row_capacity(threshold, INT64_MAX)) - mean;
    EXPECT_GE(t * t / (2 * (mean + t / 3)), 64 - 1 / t - 0.5) << threshold;
  }
}

TEST(Thinning, VarianceOfOneElement) {
  // Kept with p / threshold: the expectation of the estimates.
  const double p = 0.25, threshold = 0.5, factor = 3;
  DrawVariance<double> v;
  v.add_drawn(p, factor, threshold);
  EXPECT_DOUBLE_EQ(v.variance * p / threshold, p * (threshold - p) * factor * factor);
  EXPECT_DOUBLE_EQ(v.square * p / threshold, p * p * factor * factor);
  EXPECT_EQ(DrawVariance<double>{}.relative(), 0);
}

}  // namespace
}  // namespace logitless
