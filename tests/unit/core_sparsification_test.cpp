// The random numbers of sparsified gradients, and the room of a row's list.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/sparsification.h"

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

TEST(Sparsification, UniformsAreInsideTheInterval) {
  EXPECT_GT(draw_uniform(0), 0);
  EXPECT_LT(draw_uniform(UINT32_MAX), 1);
}

// Covers each of the three arguments while the others stay.
TEST(Sparsification, UniformInEveryArgument) {
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
TEST(Sparsification, NeighborsAreIndependent) {
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

TEST(Sparsification, RowCapacity) {
  EXPECT_EQ(sparsified_row_capacity(1e-30, 1000), 1000);
  EXPECT_EQ(sparsified_row_capacity(1.0, 7), 7);
  EXPECT_EQ(sparsified_row_capacity(0x1p-10, 131072), 1024 + 362 + 48);
  // The bound in the function's comment: exp(-64) for the mean 1 / threshold.
  for (double threshold : {1.0, 0.1, 0x1p-10, 0x1p-16}) {
    const double mean = 1 / threshold;
    const double t = static_cast<double>(sparsified_row_capacity(threshold, INT64_MAX)) - mean;
    EXPECT_GE(t * t / (2 * (mean + t / 3)), 64 - 1 / t - 0.5) << threshold;
  }
}

}  // namespace
}  // namespace logitless
