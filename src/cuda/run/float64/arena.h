#pragma once
#include <cstdint>

#include "core/problem.h"
#include "core/row_coefficients.h"
#include "core/row_stats.h"
#include "core/workspace.h"
#include "cuda/run/arena.h"

namespace logitless::cuda::float64 {

// Numbers that only the device knows.
struct Scalars {
  double divisor;           // of the mean
  double class_weight_sum;  // sum_j w_j
  int64_t invalid_count;
  unsigned long long correct_count;
};

// What one row's gradient is made of.
struct RowGradient {
  LogSumExp<double> lse;
  RowCoefficients<double> k;
};

// Statistics are made of so many columns at a time. Windows are whole numbers of them, so the cut into
// windows changes no bit.
inline constexpr int64_t kStrip = 64;

// Logits are made in blocks of so many rows and columns.
struct BlockSize {
  int64_t rows = 1, columns = 1;
};

// What a run needs beyond inputs and outputs. N tokens, D hidden, R rows and W columns of a block.
struct Arena {
  Scalars* scalars = nullptr;
  int32_t* target = nullptr;          // [N] column of the shard, -1 elsewhere, or kIgnoredRow
  RowStats<double>* stats = nullptr;  // [N]
  JoinedTargets joined;               // [N] with several targets a row, as the next
  double* target_logits = nullptr;    // [N, targets_per_row]
  double* row_loss = nullptr;         // [N]
  TopEntry<double>* top = nullptr;    // [N, top_k] the largest logits, in order
  RowGradient* gradients = nullptr;   // [N]
  double* block = nullptr;            // [R, W] dot products, then dz
  double* sums = nullptr;             // [R, D] of d_hidden, then [W, D] of d_classifier
  double* bias_sums = nullptr;        // [W]
};

// With a Workspace that only counts: how many bytes a run needs (workspace.used()).
Arena lay_out(const Problem& problem, const BlockSize& size, Workspace& workspace);

}  // namespace logitless::cuda::float64
