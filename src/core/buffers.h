#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/row_lists.h"

namespace logitless {

// A gradient as an array, in memory of the run's device.
struct GradientArray {
  void* data;
  DType dtype;
  int64_t size;  // elements
};

// Pointers of one run. Optional ones are null when the Problem does not ask for them. Strides are in
// elements; the innermost dimension is contiguous. "stats" is Problem::stats_dtype().
struct Buffers {
  // inputs
  const void* hidden = nullptr;  // [N, D]
  int64_t hidden_stride = 0;
  const void* classifier = nullptr;  // [V, D]
  int64_t classifier_stride = 0;
  const void* bias = nullptr;           // [V]
  const void* targets = nullptr;        // [N], or [N, targets_per_row]: global vocabulary ids
  const void* target_weight = nullptr;  // [N, targets_per_row] stats; null: ones
  const void* class_weight = nullptr;   // [V_total] stats
  const void* token_weight = nullptr;   // [N] stats
  const void* temperature = nullptr;    // [N] stats
  const void* num_items = nullptr;      // scalar stats, in place of Problem::num_items; null: that
  // upstream gradients; null grad_loss means 1
  const void* grad_loss = nullptr;  // scalar, or [N] with Reduction::kNone; stats
#define LOGITLESS_MEMBER(name) const void* grad_##name = nullptr;  // [N] stats
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  // Row statistics (forward), each [N] stats. Any may be null except for a shard, where all that the loss
  // needs must be given. Ignored rows hold the statistics of no column: max -inf, the sums 0.
  void* max = nullptr;  // max_j z_ij
#define LOGITLESS_MEMBER(name, ...) void* name = nullptr;
  LOGITLESS_ROW_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  // losses (forward of a whole vocabulary); ignored rows hold 0 (argmax -1)
  void* loss = nullptr;  // scalar, or [N] with Reduction::kNone; stats
  // lse is an input of the backward pass, as is entropy with grad_entropy
#define LOGITLESS_MEMBER(name, type, ...) type* name = nullptr;  // [N]
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  void* lse_low = nullptr;           // [N] stats: what rounding took off lse; as lse, and never required
  int64_t* argmax = nullptr;         // [N] global id of the largest logit, the first of equals
  int64_t* correct_count = nullptr;  // scalar: rows whose argmax is the target
  int64_t* valid_count = nullptr;    // scalar: rows that are not ignored
  // The largest logits of a row in order, a NaN first and of equals the smaller id; ignored rows hold -1 and
  // 0.
  int64_t* top_ids = nullptr;     // [N, top_k] global ids
  void* top_log_probs = nullptr;  // [N, top_k] stats: z_ij - lse_i
  // z_ij - lse_i of each target; 0 where that is ignore_index, and in ignored rows.
  void* target_log_probs = nullptr;  // [N, targets_per_row] stats
  int64_t* invalid_targets =
      nullptr;  // [2], devices only: how many targets are out of range, the first such row
  // thinned gradients
  void* draws = nullptr;          // kept elements, in a form of the backend's own, Plan::draws_bytes
  const void* seed = nullptr;     // scalar int64, in place of Problem::seed; null: that
  int32_t* kept_count = nullptr;  // [N] elements that a row's gradient was made of, its target included
  void* draw_variance =
      nullptr;  // [N] stats: estimated variance of the drawn row of dz over its squared norm
  // gradients
  void* d_hidden = nullptr;  // [N, D]; ignored rows are zero
  int64_t d_hidden_stride = 0;
  void* d_classifier = nullptr;  // [V, D]
  int64_t d_classifier_stride = 0;
  void* d_bias = nullptr;  // [V]

  bool operator==(const Buffers&) const = default;
};

}  // namespace logitless
