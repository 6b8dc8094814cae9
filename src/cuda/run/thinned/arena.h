#pragma once
#include "cuda/run/arena.h"
#include "cuda/run/thinned/thinned.h"

namespace logitless::cuda {

// What a thinned run needs beyond inputs and outputs. As Arena (a part of which it fills), and: K dense, H
// hot and S sampled columns, L kept elements of all lists.
struct ThinArena {
  Arena base;  // exps: dz of the dense and hot columns [N, padded K + H]
  ThinSizes sizes;
  DrawLists lists;                  // in the workspace, or of the caller
  Kept* kept = nullptr;             // [N, capacity], in place of the draws where those are not the caller's
  int32_t* kept_count = nullptr;    // [N]
  int32_t* dense_target = nullptr;  // [N]
  float* row_threshold = nullptr;   // [N]
  uint8_t* out_of_range = nullptr;  // one for 128 rows
  // Rows to draw again, in portions of as many as there is room for
  int64_t portion = 0, portions = 0;
  int32_t* redrawn = nullptr;                    // [N]
  int32_t* redrawn_count = nullptr;              // [1 + portions], or more
  float* portion_anchor = nullptr;               // [portion]
  float* portion_threshold = nullptr;            // [portion]
  float* portion_inverse_temperature = nullptr;  // [rows drawn again at once] or null: ones
  float* dense_bias = nullptr;                   // [K], and later sums of K + H
  float* sample_others = nullptr;                // [S]
  // of the vocabulary
  int32_t* role = nullptr;          // [V]
  int32_t* column_count = nullptr;  // [V + 1]
  int32_t* column_start = nullptr;  // [V + 1]
  int32_t* bins = nullptr;          // [kCountBins]
  uint64_t* totals = nullptr;       // [kMostCountBlocks]
  int32_t* columns = nullptr;       // [K + max(S, H)] dense, then first sampled, later hot
  int32_t* hot_list = nullptr;      // [H + 1] scratch of the choice of hot ones
  void* scan = nullptr;
  size_t scan_bytes = 0;
  int32_t* heavy = nullptr;  // [L / kHeavyColumn + 1], and their number
  // In one piece of memory, one after the other: logits of the sample; the draws and then kept, where those
  // are not the caller's; lists of columns.
  float* sample_logits = nullptr;  // [N, S]
  KeptRow* sorted = nullptr;       // [L]
  // In another: copies of `columns`, and base.exps; rows to draw again; lists of columns before they are
  // sorted.
  void* columns_copy = nullptr;    // [K + max(S, H), padded D]
  void* portion_hidden = nullptr;  // [portion, padded D]
  KeptRow* by_column = nullptr;    // [L]
  // For products
  void* hidden_copy = nullptr;     // [N, padded D] with 0 for ignored rows, where d_hidden has no room for it
  void* dense_gradient = nullptr;  // [K + H, D] of d_classifier's dtype, or fp32
  float* hidden_gradient = nullptr;  // [N, D], where no product writes d_hidden's dtype
  // With label smoothing
  float* sum_parts = nullptr;       // [kSumParts, D]
  float* classifier_sum = nullptr;  // [D]
  float* hidden_sum = nullptr;      // [D]
};

// Bytes of Buffers::draws, and its parts.
uint64_t draws_bytes(const Problem& problem);
DrawLists draw_lists(const Problem& problem, void* draws);

// draws: Buffers::draws, the place of the lists where the problem keeps them.
ThinArena lay_out_thinned(const Problem& problem, const PlanDetail& detail, Workspace& workspace,
                          void* draws);

// dtype of the products that make gradients of the dense columns.
DType dense_gradient_dtype(const Problem& problem);
// Whether a product can write d_hidden in its own dtype.
bool writes_d_hidden(const Problem& problem);

}  // namespace logitless::cuda
