#pragma once
#include <cstdint>
#include <limits>
#include <span>

#include "core/problem.h"
#include "core/row_stats.h"
#include "core/sampling.h"
#include "core/top_k.h"
#include "core/workspace.h"
#include "cpu/plan/shape.h"
#include "cpu/run/task_groups.h"
#include "cpu/simd/kernels.h"
#include "cpu/sparsified/arena.h"

namespace logitless::cpu {

// Scratch of one worker.
struct WorkerArena {
  std::span<float> logits;          // [mr, vocab_block]
  std::span<uint32_t> weight;       // [vocab_block / nr, hidden_units, nr], of block `packed_block`
  std::span<float> rounded;         // [nr, D] rows in e4m3
  std::span<float> bias;            // [vocab_block]
  std::span<float> class_weight;    // [vocab_block]
  std::span<uint32_t> dz_pairs;     // [token_block / 2, vocab_block], bf16 pairs only
  std::span<float> d_weight;        // [vocab_block, range]
  std::span<int64_t> packed_block;  // [1]
  // Elements of a row that a kernel has drawn or selected: [vocab_block + a vector] each.
  std::span<int32_t> columns;
  std::span<float> element_logits;  // their logits
  SparsifiedWorker sparsified;
};

// The largest logits of a row so far.
struct TopRow {
  int32_t lock = 0;
  int32_t count = 0;
  // The smallest of the row's largest logits, once there are enough. Whoever reads it without the lock may
  // get an older value, which is no larger.
  float least = -std::numeric_limits<float>::infinity();
};

// A sample of a row so far. Its key only rises, so whoever reads it without the lock gets a lower bound.
struct SampleRow {
  int32_t lock = 0;
  SampleKey of;
  SampledLogit<float> best;
};

// Everything a run needs beyond inputs and outputs.
// T = token_chunk, B = vocab_block, W = blocks of the windows that are alive at once, R = rows whose
// coefficients are kept (T, or N if the vocabulary is swept), K = targets of a row.
struct Arena {
  std::span<int64_t> rows;               // [N] rows that are not ignored
  std::span<int64_t> target;             // [T, K] column of the target in this vocabulary, -1 outside
  std::span<RowStats<double>> stats;     // [T]
  std::span<double> gathered;            // [ranks, numbers, T] the statistics of a group
  std::span<float> target_logit;         // [T, K]
  std::span<float> inverse_temperature;  // [T], empty without temperatures of rows
  // The row's lse is lse_high + lse_residual.
  std::span<float> lse_high, lse_residual, a, b, c;  // [R] each
  std::span<float> g, target_gradient;               // [R, K] subtracted at the targets; dz at the targets
  std::span<uint32_t> hidden_rows;                   // [T, hidden_stride] rows operand of the logits
  // Rows for d_weight, as hidden_rows, where logits are products of rounded ones; else empty.
  std::span<uint32_t> unrounded_rows;
  std::span<uint32_t> hidden_panels;  // token blocks of [hidden_padded / nr, units, nr], for d_weight
  std::span<float> d_hidden;          // [T, gradient_stride]
  // The sum over chunks where neither one chunk nor the output can hold it: [V, hidden_padded], or [window *
  // B, hidden_padded] if the vocabulary is swept.
  std::span<float> d_weight;
  std::span<float> d_bias;  // [blocks * B]
  // Statistics of the blocks of forward windows, [W, T] each.
  std::span<float> block_max, block_sum;
#define LOGITLESS_MEMBER(name, part, ...) std::span<float> block_##part;
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  std::span<int32_t> block_argmax;
  std::span<double> block_weight;  // [blocks] sums of class weights, with block_weighted
  // Exp logits of the first kept_blocks blocks, unless they are in d_weight; and memory for the exp logits
  // and gradients of the windows' other blocks.
  std::span<std::byte> kept_exp_logits;    // [blocks, T, B] elements
  std::span<float> kept_offset;            // [blocks, T]
  std::span<std::byte> window_exp_logits;  // [W, T, B] elements
  std::span<float> window_offset;          // [W, T]
  std::span<uint32_t> window_panels;       // [W, hidden_padded / nr, B / pair, nr], of the weight
  std::span<TaskGroup> groups;             // a chunk's groups of tasks
  std::span<std::byte> worker_memory;      // `threads` times worker_bytes
  uint64_t worker_bytes = 0;
  std::span<TopRow> top_rows;           // [T]
  std::span<TopLogit<float>> top_best;  // [T, top_k] in order
  std::span<SampleRow> samples;         // [T, num_samples]
  SparsifiedArena sparsified;
};

// Returns the arena with the coefficients of a chunk's rows in place of all rows', if the vocabulary is
// swept.
Arena with_rows_of(const Arena& arena, const Problem& problem, int64_t first, int64_t count);

// Lays out the arena. A Workspace that only counts gives the bytes that the schedule needs
// (workspace.used()).
Arena lay_out(const Problem& problem, const Kernels& kernels, const Shape& shape, const Schedule& schedule,
              Workspace& workspace);

WorkerArena lay_out_worker(const Problem& problem, const Kernels& kernels, const Shape& shape,
                           Workspace& workspace);

}  // namespace logitless::cpu
