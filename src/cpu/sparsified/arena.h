#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/problem.h"
#include "core/row_stats.h"
#include "core/workspace.h"
#include "cpu/plan/shape.h"
#include "cpu/simd/kernels.h"

namespace logitless::cpu {

// Vocabulary blocks are drawn in windows 0, 1, 2-3, 4-7, ... of at most kLargestDrawWindow.
// After each window, rows know more of their lse, which becomes the lse estimate of the next. Doubling the
// columns seen costs a row at most 1 / threshold elements of the first draw, even where all columns are
// alike.
// Windows depend on nothing but the number of blocks, because elements depend on the lse estimates.
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

// Whether a sparsified run draws elements itself: every run but a backward pass with a forward pass' draws.
inline bool draws_elements(const Problem& p) {
  return p.is_sparsified() && !(p.has.saved && p.pass == Pass::kBackward);
}

// The draws of a forward pass: Buffers::draws, or a part of the workspace. Rows are those that are not
// ignored, in order.
struct Draws {
  std::span<int64_t> seed;            // [1]
  std::span<int32_t> count;           // [N] elements of a row
  std::span<float> target_logit;      // [N] as computed in the pass, 0 where the target is in another shard
  std::span<float> lse_estimate;      // [windows, N] of lse, when a window of vocabulary blocks was drawn
  std::span<SparseElement> elements;  // [N, capacity] column and logit
  std::span<float> probability;       // [N, capacity] behind a screen: of having been kept
};

Draws lay_out_draws(const Problem& problem, const Shape& shape, Workspace& workspace);

// Room of a row's list, its target included. A block's elements are added to a list that was sparsified down
// to what a row can have at most in the end (sparsified.h). No column comes twice.
int64_t row_capacity(const Problem& problem, const Shape& shape);

// A row while several threads draw its elements.
struct RowDraw {
  int32_t lock = 0;
  LogSumExp<double> known;  // sum of the exp logits that are known so far: at most lse
};

// One task adds up the gradients of at most so many columns, or of so many elements of all rows.
inline constexpr int64_t kRangeColumns = 1024;
inline constexpr int64_t kRangeElements = 8192;

// Parts of a long sum of rows. Threads share them, and the order of the sum depends on no number of threads.
inline constexpr int64_t kSumParts = 64;

struct SparsifiedArena {
  Draws draws;
  std::span<RowDraw> row_draws;       // [T]
  std::span<SparseElement> elements;  // [N, capacity] column and gradient of the logit; the draws' own memory
                                      // where that is the workspace
  std::span<int32_t> count;           // [N]
  std::span<float> c;                 // [N] label smoothing's coefficients
  std::span<int32_t> column_count;    // [V]
  std::span<int64_t> range_start;     // first columns of ranges and the end
  std::span<float> sum_parts;         // [kSumParts, hidden_padded] of weighted_sum()
  std::span<float> weight_sum;        // [hidden_padded] sum_j w_j C_j
  std::span<float> hidden_sum;        // [hidden_padded] sum_i c_i E_i
  int64_t capacity = 0;

  std::span<SparseElement> row(std::span<SparseElement> lists, int64_t i) const {
    return lists.subspan(static_cast<size_t>(i * capacity), static_cast<size_t>(capacity));
  }
};

// Scratch of one worker.
struct SparsifiedWorker {
  std::span<float> q;                 // [vocab_block]
  std::span<float> sums;              // [hidden_padded]
  std::span<SparseElement> elements;  // [the largest range's] row and gradient, column by column
  std::span<int32_t> end;             // [kRangeColumns] end of each column's elements
};

SparsifiedArena lay_out_sparsified(const Problem& problem, const Shape& shape, int64_t token_chunk,
                                   Workspace& workspace);
SparsifiedWorker lay_out_sparsified_worker(const Problem& problem, const Shape& shape, Workspace& workspace);

// Elements of all rows in the largest range: one column may have every row.
inline int64_t range_elements(const Problem& p) {
  return std::max(p.tokens, kRangeElements);
}

}  // namespace logitless::cpu
