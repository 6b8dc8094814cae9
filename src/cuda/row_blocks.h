#pragma once
#include <cstdint>

namespace headroom::cuda {

// Rows are switched on and off in blocks of this many.
inline constexpr int64_t kRowBlock = 128;

constexpr int64_t row_blocks(int64_t rows) {
  return (rows + kRowBlock - 1) / kRowBlock;
}

}  // namespace headroom::cuda
