#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "core/plan.h"
#include "core/problem.h"
#include "core/row_stats.h"
#include "core/workspace.h"
#include "cpu/kernels.h"
#include "cpu/shape.h"
#include "cpu/task_groups.h"
#include "cpu/thinned/arena.h"

namespace headroom::cpu {

// The backend's own numbers in a Plan.
inline int64_t& forward_window(Plan& plan) {
  return plan.detail[0];  // vocabulary blocks whose statistics are kept until they are merged
}
inline int64_t forward_window(const Plan& plan) {
  return plan.detail[0];
}
inline int64_t& backward_window(Plan& plan) {
  return plan.detail[1];  // vocabulary blocks whose gradients are turned into d_hidden together
}
inline int64_t backward_window(const Plan& plan) {
  return plan.detail[1];
}

// Whether d_classifier and d_bias have a pass of their own, vocabulary outside and chunks of tokens inside:
// the sum over chunks is then one window's instead of the whole classifier's, for one more product.
inline int64_t& sweeps_vocabulary(Plan& plan) {
  return plan.detail[2];
}
inline bool sweeps_vocabulary(const Plan& plan) {
  return plan.detail[2] != 0;
}

// Whether kept exps are where the gradient of their classifier rows will be, [T, B] elements at a block's
// first row: it is written once they have been read.
inline int64_t& keeps_in_gradient(Plan& plan) {
  return plan.detail[4];
}
inline bool keeps_in_gradient(const Plan& plan) {
  return plan.detail[4] != 0;
}

// How many backward windows are alive at once: while one's gradients are added up, those of the next are
// made; with a third, a late thread holds nobody up until the others are a window ahead.
inline int64_t& backward_windows_alive(Plan& plan) {
  return plan.detail[3];
}
inline int64_t backward_windows_alive(const Plan& plan) {
  return plan.detail[3];
}
inline constexpr int64_t kMostWindowsAlive = 3;

// Vocabulary blocks that have memory in those windows.
inline int64_t window_slots(const Plan& plan, const Shape& shape) {
  return std::min(shape.blocks, backward_windows_alive(plan) * backward_window(plan));
}

// Forward windows alive at once: one is merged while the next is computed. Draws of a window wait for the
// merge.
inline int64_t forward_windows_alive(const Problem& problem, const Plan& plan) {
  return problem.is_thinned() || forward_window(plan) == 1 ? 1 : 2;
}

// Scratch of one worker.
struct WorkerArena {
  std::span<float> logits;          // [mr, vocab_block]
  std::span<uint32_t> classifier;   // [vocab_block / nr, hidden_units, nr], of block `packed_block`
  std::span<float> bias;            // [vocab_block]
  std::span<float> class_weight;    // [vocab_block]
  std::span<uint32_t> dz_pairs;     // [token_block / 2, vocab_block], bf16 pairs only
  std::span<float> d_classifier;    // [vocab_block, range]
  std::span<int64_t> packed_block;  // [1]
  ThinnedWorker thinned;
};

// Everything a run needs beyond inputs and outputs. T = token_chunk, B = vocab_block, W the blocks of the
// windows that are alive at once, R the rows whose coefficients are kept: T, or N if the vocabulary is swept.
struct Arena {
  std::span<int64_t> rows;            // [N] rows that are not ignored
  std::span<int64_t> target;          // [T] column of the target in this vocabulary, -1 outside
  std::span<RowStats<double>> stats;  // [T]
  std::span<float> target_logit;      // [T]
  // The row's lse is lse_high + lse_low.
  std::span<float> lse_high, lse_low, a, b, c, g, target_gradient;  // [R] each
  std::span<uint32_t> hidden_rows;    // [T, hidden_stride] rows operand of the logits
  std::span<uint32_t> hidden_panels;  // token blocks of [hidden_padded / nr, units, nr], for d_classifier
  std::span<float> d_hidden;          // [T, gradient_stride]
  // When neither one chunk nor the output can hold the sum over chunks: [V, hidden_padded], or
  // [window * B, hidden_padded] if the vocabulary is swept.
  std::span<float> d_classifier;
  std::span<float> d_bias;  // [blocks * B]
  // Statistics of the blocks of forward windows, [W, T] each.
  std::span<float> block_max, block_sum, block_offset, block_weighted;
  std::span<int32_t> block_argmax;
  std::span<double> block_weight;  // [blocks] sums of class weights
  // Kept exps of the first cached_vocab_blocks blocks, unless they are in d_classifier, and what the windows'
  // other exps and gradients take.
  std::span<std::byte> kept_exps;      // [blocks, T, B] elements
  std::span<float> kept_anchor;        // [blocks, T]
  std::span<std::byte> window_exps;    // [W, T, B] elements
  std::span<float> window_anchor;      // [W, T]
  std::span<uint32_t> window_panels;   // [W, hidden_padded / nr, B / pair, nr], of the classifier
  std::span<TaskGroup> groups;         // of a chunk
  std::span<std::byte> worker_memory;  // `threads` times worker_bytes
  size_t worker_bytes = 0;
  ThinnedArena thinned;
};

// The arena with the coefficients of a chunk's rows in the place of all rows', if the vocabulary is swept.
Arena with_rows_of(const Arena& arena, int64_t first, int64_t count);

// With a Workspace that only counts, how many bytes the plan needs (workspace.used()).
Arena lay_out(const Problem& problem, const Kernels& kernels, const Shape& shape, const Plan& plan,
              Workspace& workspace);

WorkerArena lay_out_worker(const Problem& problem, const Kernels& kernels, const Shape& shape,
                           Workspace& workspace);

}  // namespace headroom::cpu
