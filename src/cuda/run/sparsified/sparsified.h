#pragma once
// Kernels of sparsified gradients (docs/sparsified.md). Every launcher only queues; pointers are on the
// device. Rows are the caller's: they are not compacted. N tokens, V columns of the shard, K dense columns, S
// sampled ones. Most kernels get the whole arena.
#include <cstdint>

#include "cuda/rows/gathers.h"
#include "cuda/rows/rows.h"
#include "cuda/run/runner.h"
#include "cuda/run/sparsified/arena.h"

namespace logitless::cuda {

// ---- run.cpp
//
// Runs a sparsified plan, between the preparation of rows and the end of gradients. All rows are one chunk.
void run_sparsified(const Runner& run, const SparsifiedArena& t);
// Copies the first `count` of t.columns, with zeros if there is no column, and the dense ones' bias.
ConstMatrix copy_columns(const Runner& run, const SparsifiedArena& t, int64_t count);
// ---- gradients.cpp
void gradients_of_draws(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                        const ConstMatrix& hidden);

// ---- chosen_columns.cu
//
// Makes the most frequent targets dense columns (of equals the first), and samples one of the other columns
// from each stretch of the vocabulary.
struct ChooseColumns {
  const int32_t* target;  // [N] as Arena::target
  int64_t tokens, vocab, dense, sampled;
  int32_t* count;          // [V] scratch
  int32_t* bins;           // [kCountBins] scratch
  uint64_t* totals;        // [kMostCountBlocks] scratch
  int32_t* role;           // [V] number of the dense column, -1, or -2 - s for sample s
  int32_t* dense_columns;  // [K]
  int32_t* dense_copy;     // [K] a copy, or null
  int32_t* sample;         // [S] column, or kIgnoredRow: no other column in the stretch
  float* sample_others;    // [S] further columns of the stretch that are not dense; -1: no sample either
  uint64_t* seed;          // scalar, set to given_seed's (null: known_seed); or null
  const int64_t* given_seed;
  int64_t known_seed;
};
void launch_choose_columns(const ChooseColumns& c, const Queue& queue);
// Derives everything that the gradients need from the dense columns: columns, roles, dense_target, and counts
// that begin with 0.
void launch_assign_roles(const SparsifiedArena& t, const Queue& queue);
// out[k] = vector[columns[k]]
void launch_gather_vector(const float* vector, const int32_t* columns, int64_t count, float* out,
                          const Queue& queue);

// ---- estimate_lse.cu
//
// Range of a row's sum of exp logits relative to the lse estimate, without optional sums: exp(-60) to
// exp(60).
inline constexpr SumRange kEstimatedRange{8.7e-27, 1.1e26};
struct LseEstimate {
  int64_t rows, sampled;
  const PartialStats* partials;  // of the dense columns, a struct on the host; cleared afterwards
  const float* logits;           // [N, S] products of the sampled columns
  const int32_t* sample;         // [S] as ChooseColumns
  const float* sample_others;    // [S] below 0: there is no such sample
  LogitTransform<float> transform;
  float threshold;
  const int32_t* target;         // [N]
  const float* target_logit;     // [N]
  const int32_t* role;           // [V]
  float* dense_lse;              // [N] log of the dense columns' sum; or null
  float* no_threshold;           // [N] becomes infinity; or null
  float* lse_estimate;           // [N]
  float* lse_estimate_residual;  // [N] becomes 0
  float* logit_offset;           // [N] the same as lse_estimate
  float* row_threshold;          // [N]
  int32_t* count;                // [N] becomes 0
  int32_t* redrawn_count;        // scalar, becomes 0; or null
};
void launch_estimate_lse(const LseEstimate& g, const Queue& queue);
// Joins the lse estimates of a group's ranks, each over its own columns, to lse_estimate and logit_offset of
// all columns. A rank that seems to have almost nothing of a row gets lower values, so that its sums stay in
// range whatever others estimate. All estimates are in base.gathered, [ranks, N].
void launch_merge_estimates(const SparsifiedArena& t, int64_t rank, int64_t ranks, const Queue& queue);
// Sets the lse estimate to the arena's lse, which is known.
void launch_known_estimate(const SparsifiedArena& t, const Queue& queue);
// ---- redraw.cu
//
// After the first draw, lists rows whose lse estimate was too low or too high. They are drawn again with lse
// as the estimate. The decision uses sums that do not depend on the seed, so it favors no outcome of the
// draw.
//
// The first launch, before lse is known, lists rows whose draw exceeds the lists (they expect more than
// most_expected over threshold), or whose sum leaves the range of exp logits. Listed rows get the lse
// estimate -inf and the count 0. Blocks with a row out of range are marked in summed_again, and their
// partials are cleared.
//
// seldom_differs: a row that is drawn again gets other bits of its logits. From kLargeLogit on this shows, so
// all rows of its block are listed, the block is marked, and a sum below least_sum counts as a bad estimate.
//
// Behind a screen a sum below least_sum counts as a bad estimate. All rows of a listed row's block are listed
// with it, so that the block has both exact sums and exact logits. With one of them alone its rows could keep
// more elements than all lists have room for.
void launch_find_bad_estimates(const SparsifiedArena& t, double most_expected, double least_sum,
                               bool seldom_differs, const Queue& queue);
// For the marked blocks of rows, which have new sums relative to maxima: makes the sums relative to their lse
// as the logit offset.
void launch_offset_redraws(const SparsifiedArena& t, bool base_2, const Queue& queue);
// Lists rows with an estimate that is too high, once lse is known, in a group over all ranks: elements above
// threshold might not be kept. base_2: the lse estimate is its rounded_offset().
void launch_find_high_estimates(const SparsifiedArena& t, bool base_2, const Queue& queue);
// Gathers portion i of the listed rows: their number in redrawn_count[1 + i], hidden rows of row_bytes (a
// multiple of 16), thresholds, and lse estimates, which become lse.
void launch_gather_redraws(const SparsifiedArena& t, int64_t i, const ConstMatrix& hidden, int64_t row_bytes,
                           const Queue& queue);

// ---- screen.cu: behind a screen (core/sparsification.h)
//
// Takes the screen's sums of the dense columns out of the partials, which become 0.
void launch_take_dense_sums(const SparsifiedArena& t, const Queue& queue);
// Puts exact sums of the dense columns in the place of the screen's. base_2: sums are relative to
// rounded_offset().
void launch_add_dense_sums(const SparsifiedArena& t, bool base_2, const Queue& queue);
// Makes lse8 from the sums, in the arena's lse.
void launch_screened_lse(const SparsifiedArena& t, bool base_2, const Queue& queue);
// Makes the second draw, evaluates the kept elements from the caller's matrices, and corrects the sums. Also
// writes Buffers::loss_error.
void launch_settle_screen(const Runner& run, const SparsifiedArena& t);
// As launch_reweight(), from the lists of launch_settle_screen(), once coefficients are known.
void launch_finish_screened_lists(const Runner& run, const SparsifiedArena& t);

// ---- reweight.cu: order, second draw and coefficients of each row's list
//
// Makes lists of kept elements in the order of RowOrder, the target last, and counts the rows that keep each
// column. Also writes Buffers::kept_count, which counts every dense column, and draw_variance. The latter is
// for now the variance of the drawn columns; their part of the squared norm replaces row_threshold.
void launch_reweight(const Runner& run, const SparsifiedArena& t);
// variance[row] /= square[row] + the squared norm of the dense columns' part
void launch_relative_variance(const ConstMatrix& dz, int64_t rows, int64_t dense, const float* dz_unscale,
                              const float* square, float* variance, const Queue& queue);

// ---- frequent_columns.cu: columns with many kept elements become columns of dz behind the dense ones
//
// Writes the frequent columns to `columns` behind the dense ones, ascending, and kIgnoredRow behind the last
// one. Also sets their roles, and their counts to 0.
void launch_choose_frequent(const SparsifiedArena& t, const Queue& queue);
// Moves elements of frequent columns from rows' lists to dz. dz: [N, frequent] behind the dense columns.
// scale: factor of stored values; null: 1.
void launch_spread_frequent(const SparsifiedArena& t, const Matrix& dz, const float* scale,
                            const Queue& queue);

// ---- column_lists.cu: turns lists of rows into lists of columns
void launch_column_lists(const SparsifiedArena& t, const Queue& queue);

// ---- order.cu: sorts the lists of columns by row, which makes sums repeatable
//
// d_bias: [V] += sums of values, or null.
void launch_order_lists(const SparsifiedArena& t, float* d_bias, const Queue& queue);

// ---- scatter_dense.cu
//
// Rows of the dense and frequent columns: to[column[k]] = (accumulate ? to : 0) + from[k]
struct ScatterDense {
  const int32_t* column;  // below 0: there is none
  int64_t count, columns;
  ConstMatrix from;
  Matrix to;
  bool accumulate;
  Smoothing smoothing;  // row: a column of the vocabulary
};
void launch_scatter_dense(const ScatterDense& s, const Queue& queue);

}  // namespace logitless::cuda
