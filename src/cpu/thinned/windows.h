#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace logitless::cpu {

// Vocabulary blocks are drawn in windows 0, 1, 2-3, 4-7, ... of at most kLargestDrawWindow: after each, rows
// know more of their lse, which is the guess of the next. A doubling of the columns seen costs a row no more
// than 1 / threshold elements of the first draw, even where all columns are alike. Windows depend on nothing
// but the number of blocks, as elements do on the guesses.
inline constexpr int64_t kLargestDrawWindow = 64;
inline constexpr int64_t kDoublings = 6;  // 2^kDoublings = kLargestDrawWindow

inline int64_t draw_window_of(int64_t block) {
  if (block < kLargestDrawWindow) return static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(block)));
  return kDoublings + block / kLargestDrawWindow;
}

inline int64_t draw_window_start(int64_t window) {
  if (window <= kDoublings) return (int64_t{1} << window) / 2;
  return (window - kDoublings) * kLargestDrawWindow;
}

inline int64_t draw_windows(int64_t blocks) {
  return blocks == 0 ? 0 : draw_window_of(blocks - 1) + 1;
}

}  // namespace logitless::cpu
