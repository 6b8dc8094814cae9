#pragma once
#include "core/host_device.h"
#include "cuda/rows/gathers.h"
#include "cuda/run/arena.h"
#include "cuda/run/sparsified/sizes.h"

namespace logitless::cuda {

// Contents of Buffers::draws: everything that a backward pass needs of the first draw.
struct DrawLists {
  uint64_t* seed = nullptr;                // scalar
  int32_t* dense = nullptr;                // [K] dense columns, ascending
  int32_t* count = nullptr;                // [N]
  float* lse_estimate = nullptr;           // [N]
  float* lse_estimate_residual = nullptr;  // [N] rounding error of the lse estimate, if that is lse
  // [N] from the product that made the sums: a separate product would be rounded differently from lse
  float* target_logit = nullptr;
  uint8_t* summed_again = nullptr;  // one flag for 128 rows, whose sums a launch with `seldom` made
  Draw* elements = nullptr;         // [N, capacity]
};

// Scratch for choosing columns by count: a histogram, and a number for each block of the kernel's threads.
inline constexpr int kCountBins = 1024, kMostCountBlocks = 64;

// A run behind a screen (core/sparsification.h).
struct ScreenArena {
  float* target_logit8 = nullptr;  // [N] as the screen has it
  float* no_threshold = nullptr;   // [N] infinity, with which nothing is drawn
  float* dense_lse = nullptr;      // [N] log of the sum of exp logits of the dense columns
  float* dense_sum = nullptr;      // [N] the same sum as the screen has it, relative to the logit offset
  float *variance = nullptr, *square = nullptr;  // [N] as DrawVariance, of lists before coefficients

  // Between the second draw and the lists
  ColumnRanges ranges;
  int32_t* range_end = nullptr;  // [N, ranges] in `draws`
  Draw* draws = nullptr;         // [N, capacity] kept ones, by range
  float* logits = nullptr;       // [N, capacity] exact ones of `draws`

  LOGITLESS_HD bool used() const { return target_logit8 != nullptr; }
  LOGITLESS_HD int32_t list_count(int64_t row) const { return range_end[(row + 1) * ranges.count - 1]; }
};

// The workspace of a sparsified run. It includes a partly filled Arena, with its conventions. K dense, H
// frequent and S sampled columns, L kept elements of all lists.
struct SparsifiedArena {
  int64_t rows = 0, vocab = 0;  // N, V
  float threshold = 0;
  bool lists_columns = false;  // gradients of columns need their lists
  Arena base;                  // exp_logits: dz of the dense and frequent columns [N, padded K + H]
  SparsifiedSizes sizes;
  DrawLists lists;                  // in the workspace or the caller's
  Kept* kept = nullptr;             // [N, capacity], replaces the draws if those are not the caller's
  int32_t* kept_count = nullptr;    // [N]
  int32_t* dense_target = nullptr;  // [N]
  float* row_threshold = nullptr;   // [N]
  // Rows to draw again, in portions as large as the available memory
  int64_t portion = 0, portions = 0;
  int32_t* redrawn = nullptr;                    // [N]
  int32_t* redrawn_count = nullptr;              // [1 + portions], or more
  float* portion_offset = nullptr;               // [portion]
  float* portion_threshold = nullptr;            // [portion]
  float* portion_inverse_temperature = nullptr;  // [rows drawn again at once]; null: ones
  float* dense_bias = nullptr;                   // [K], and later sums of K + H
  float* sample_others = nullptr;                // [S]
  // Columns of the vocabulary
  int32_t* role = nullptr;           // [V]
  int32_t* column_count = nullptr;   // [V + 1]
  int32_t* column_start = nullptr;   // [V + 1]
  int32_t* bins = nullptr;           // [kCountBins]
  uint64_t* totals = nullptr;        // [kMostCountBlocks]
  int32_t* columns = nullptr;        // [K + max(S, H)] dense, then first sampled, later frequent
  int32_t* frequent_list = nullptr;  // [H + 1] scratch for choosing frequent columns
  void* scan = nullptr;
  size_t scan_bytes = 0;
  int32_t* heavy = nullptr;  // [L / kHeavyColumn + 1], and their number
  // These share one piece of memory, one after the other in time: logits of the sample; the draws and then
  // the kept elements, if those are not the caller's; lists of columns.
  float* sample_logits = nullptr;  // [N, S]
  KeptRow* sorted = nullptr;       // [L]
  // These share another piece: copies of `columns` with base.exp_logits; rows to draw again; unsorted lists
  // of columns.
  void* columns_copy = nullptr;    // [K + max(S, H), padded D]
  void* portion_hidden = nullptr;  // [portion, padded D]
  KeptRow* by_column = nullptr;    // [L]
  // For products
  void* hidden_copy = nullptr;       // [N, padded D] with 0 for ignored rows, if d_hidden has no room for it
  void* dense_gradient = nullptr;    // [K + H, D] in d_weight's dtype or fp32
  float* hidden_gradient = nullptr;  // [N, D], if no product writes d_hidden's dtype
  // With label smoothing
  float* hidden_sum = nullptr;  // [D]
  ScreenArena screen;
};

// Bytes of Buffers::draws, and its parts.
uint64_t draws_bytes(const Problem& problem);
DrawLists draw_lists(const Problem& problem, void* draws);

// draws: Buffers::draws, which holds the lists if the problem keeps them.
SparsifiedArena lay_out_sparsified(const Problem& problem, const PlanDetail& detail, Workspace& workspace,
                                   void* draws);

// Returns the dtype of products that make gradients of the dense columns.
DType dense_gradient_dtype(const Problem& problem);
// Returns whether a product can write d_hidden in its own dtype.
bool writes_d_hidden(const Problem& problem);

}  // namespace logitless::cuda
