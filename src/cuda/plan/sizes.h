#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace logitless::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Rows are switched on and off in blocks of this many.
inline constexpr int64_t kRowBlock = 128;

constexpr int64_t row_blocks(int64_t rows) {
  return ceil_div(rows, kRowBlock);
}

// Returns the largest number of rows of a number's class. Rows are tokens, whose number may be new at every
// call; what is made for a class serves all of its numbers. There are eight classes from a power of two to
// the next.
inline int64_t largest_of_class(int64_t rows) {
  rows = std::max<int64_t>(rows, 1);
  const auto step = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)) / 16);
  return step > 0 ? ceil_div(rows, step) * step : rows;
}

}  // namespace logitless::cuda
