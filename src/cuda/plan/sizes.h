#pragma once
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

}  // namespace logitless::cuda
