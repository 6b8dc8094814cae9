#pragma once
// Work on N-vectors and copies around the products. Every launcher only queues; pointers are of the device.
#include <cstdint>
#include <span>

#include "core/buffers.h"
#include "core/logit_transform.h"
#include "core/problem.h"
#include "core/row_coefficients.h"
#include "cuda/run/arena.h"
#include "cuda/runtime/matrix.h"

namespace logitless {
struct Divergence;
}

namespace logitless::cuda {

struct Gemm;
class Queue;

// Targets and the loss, as kernels of rows read them.
struct RowTargets : Problem {
  const void* targets;
  bool wide_targets;        // int64
  LossParams<double> loss;  // without class_weight_sum, which only the device knows: known_loss()
  bool is_none;             // the reduction
  // With targets_per_row; `targets` are then those that rows count by (JoinedTargets).
  const void* row_targets;          // [tokens, targets_per_row]
  bool wide_row_targets;            // int64
  const double* target_weight_sum;  // [tokens], of the weights of a row of targets
};
// It needs to know the weights, too. Real: as of ArenaOf.
template <class Real>
struct RowInputsOf : RowTargets {
  const Real* class_weight;   // [vocab_total] or null
  const Real* token_weight;   // [tokens] or null
  const Real* temperature;    // [tokens] or null
  const Real* num_items_at;   // in place of num_items, or null
  const Real* target_weight;  // [tokens, targets_per_row] or null: ones
};
using RowInputs = RowInputsOf<float>;
template <class Real>
RowInputsOf<Real> row_inputs(const Problem& problem, const Buffers& buffers, const JoinedTargets& joined);

// ---- prepare.cu
// row_map, target, inverse_temperature, scalars and chunk_rows. compact: ignored rows are left out; else all
// rows stay in place and ignored ones get kIgnoredRow. fills: per-token outputs of the rows that are not
// computed become 0, or NaN where the target is out of range.
template <class Real>
void launch_prepare_rows(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, int64_t chunk, bool compact,
                         bool fills, const Buffers& out, const Queue& queue);

// ---- row_targets.cu: several targets a row
template <class Real>
void launch_join_targets(const RowInputsOf<Real>& in, const JoinedTargets& to, const Queue& queue);
// Logits of the targets of a chunk's rows, of operands as the products see them; 0 of ignore_index, and of
// those in other shards.
template <class Real>
struct TargetLogits {
  int64_t rows, columns;
  const int32_t *row_count, *row_map, *target;  // of the chunk
  ConstMatrix hidden, weight;                   // the caller's
  DType operand_dtype;                          // what numbers are rounded to
  LogitTransform<Real> transform;
  Real* logits;  // [rows, targets_per_row]
};
template <class Real>
void launch_target_logits(const RowTargets& in, const TargetLogits<Real>& t, const Queue& queue);
// Writes dz at the targets of a chunk's rows that are in a window.
template <class Real>
struct TargetEntries {
  int64_t first, rows;  // of the chunk
  const int32_t* row_count;
  int64_t first_column, columns;   // of the window, in the shard
  Matrix dz;                       // [rows], from the window's first column
  bool are_exp_logits;             // what is stored, times row_factor, is dz
  const float* scale;              // else what is stored is dz times it; null: 1
  LogitTransform<Real> transform;  // of the computed rows
};
template <class Real>
void launch_target_entries(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena,
                           const TargetEntries<Real>& e, const Queue& queue);

// Buffers::kept_count and draw_variance where the plan of a sparsified problem is exact.
void launch_exact_draw_stats(const RowTargets& in, int64_t columns, const Buffers& out, const Queue& queue);

// ---- load.cu: all that a chunk's first product waits for
template <class Real>
struct LoadRows {
  int64_t rows;
  const int32_t* row_count;  // rows at or past it become 0; null: all exist
  // Copies of the rows [rows, padded]; null: they stay where they are.
  Matrix to;
  int64_t padded;
  ConstMatrix from;  // null: neither copies nor logits
  int64_t columns;
  const int32_t* row_map;  // [rows] which row of `from` each is
  // z at the targets (0 where that is in another shard), and the same as the logit_offsets; null: not wanted
  Real* target_logit;              // [rows]
  float* logit_offset;             // [rows]
  const int32_t* target;           // [rows]
  ConstMatrix weight;              // the caller's
  LogitTransform<Real> transform;  // whose bias is not read: it may be the copy
  const void* bias;                // [vocab] or null
  DType bias_dtype;
  Real bias_scale;
  Real* bias_copy;  // [vocab] times bias_scale, or null
  int64_t vocab;
  PartialStatsOf<Real> partials;  // become those of no column; sum null: not wanted
  // Rows of a matrix that do not exist, which products read: [rows, tail_pieces] pieces of 16 bytes; or null
  void* tail;
  int64_t tail_pieces;
};
template <class Real>
void launch_load_rows(const LoadRows<Real>& l, const Queue& queue);

// Of a row's sum of exp_logits relative to an logit_offset.
struct SumRange {
  double least, most;
};

// ---- redo.cu: blocks of kept exp_logits that are done again
// Whether sums of exp_logits relative to one of the row's own logits may leave their range (they are not
// below 1), if none is more than most_above_offset above it.
bool may_leave_range(double most_above_offset, int64_t vocab, const PartialStats& partials);
// Finds rows whose relative_to_offset sums left the range of exp_logits: makes their logit_offsets NaN, sets
// `active` of their blocks and clears the blocks' partials. target: [rows], as ignored rows have no sums.
void launch_find_redo(const Arena& arena, int64_t rows, const int32_t* row_count, const int32_t* target,
                      const Queue& queue);
// In active blocks: logit_offset and lse_residual = lse of the joined partials. again: after find_redo and
// new sums; then of the rows alone that it found, as the others' sums are to stay as they were, and the
// partials are cleared. in_group: rows whose exp_logits are all 0 get the logit_offset 0, as other ranks may
// have some.
void launch_offset_from_partials(const Arena& arena, int64_t rows, const int32_t* row_count, bool again,
                                 const Queue& queue, bool in_group = false);

// ---- finish.cu: all that lies between a chunk's statistics and its gradients, in one pass over its rows
// Joins the partials of a chunk's rows, writes their outputs, row_loss and lse.
struct FinishRows {
  bool wanted;
  bool relative_to_offset,
      has_max;  // the sums are relative to arena.logit_offset; whether the partials hold maxima all the same
  bool base_2;  // exp_logits are powers of 2: their logit_offset is rounded_offset()
  bool writes_sum;   // of exp_logits to arena.row_factor, as they are kept
  float sum_unit;    // what this sum is times, as kept exp_logits are stored
  bool is_shard;     // on its own: without losses
  GroupStats group;  // of all ranks, in place of the partials
  bool writes_loss;  // the last chunk: loss (reduced) and correct_count from row_loss of all
};
template <class Real>
struct Coefficients {
  bool wanted;
  Real scale;                      // of the gradients: the factor between logits and products
  const Real* known_lse;           // [N] of the caller's rows, or null: arena.lse
  const Real* known_lse_residual;  // [N] or null: 0
  const Real* entropy;             // [N] or null
  const Real* grad_loss;           // scalar or [N]; null: 1
#define LOGITLESS_MEMBER(name) const Real* grad_##name;  // [N] or null
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  bool scale_dz;  // dz will have 16 bits: find the factor that makes the largest coefficient 1
};
// Kept exp_logits: row_factor, which held the sum, becomes a / sum (all in the units of what is stored), and
// the entry of the target exp - g / row_factor: so exp_logits times row_factor is dz.
struct CachedExpLogits {
  Matrix exp_logits;                // null: none are kept
  int64_t columns;                  // the first ones, whose exp_logits are kept
  bool base_2;                      // as in FinishRows; and exp_logits are stored times 2^kKeptExponent
  LogitTransform<float> transform;  // of the computed rows
  // Rows of the operands, which are multiplied with their row_factor; or null
  Matrix hidden;  // [rows, depth]
  int64_t depth;
};
template <class Real>
struct FinishChunkOf {
  int64_t first, rows;  // rows of them may exist
  const int32_t* row_count;
  FinishRows stats;
  Coefficients<Real> coefficients;
  CachedExpLogits kept;  // none of float64
};
using FinishChunk = FinishChunkOf<float>;
// Of a group: this rank's part of what ranks tell each other, from the partials of a chunk.
void launch_group_stats(const RowInputs& in, const Arena& arena, const FinishChunk& f, const GroupStats& mine,
                        const Queue& queue);
// And of itself: where its columns lie, and a digest of the targets and of vocab_total.
void launch_group_cut(const RowTargets& in, const GroupStats& mine, const Queue& queue);
// Where those of the chunk that comes first are no cut of one vocabulary, or of other targets, the divisor of
// all losses and gradients becomes NaN, and so do the statistics of the rows of this chunk and of later ones.
void launch_check_cuts(const RowTargets& in, const Arena& arena, const GroupStats& all, bool is_first,
                       int64_t rows, const Queue& queue);
template <class Real>
void launch_finish_chunk(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, const Buffers& out,
                         const FinishChunkOf<Real>& f, const Queue& queue);

// ---- copies.cu
// Something that only the device knows: whether one of these bytes is not 0. Null: it holds.
struct Condition {
  const void* bytes = nullptr;
  int64_t count = 0;
};
// Nothing is read or written where the condition does not hold.
struct RowsCopy {
  ConstMatrix from;
  const int32_t* row_map;    // which row of `from` each is; null: in order
  const int32_t* row_count;  // rows at or past it become 0; null: all exist
  Matrix to;
  const int32_t* target;          // rows of kIgnoredRow become 0; null: none
  int64_t rows, columns, padded;  // columns to copy; up to padded become 0
  Condition condition;
};
void launch_copy_rows(const RowsCopy& c, const Queue& queue);
// Rows times factor[row] and *common, in place; rows that do not exist become 0.
struct ScaleRows {
  Matrix matrix;
  int64_t rows, columns;
  const int32_t* row_count;
  const float* factor;
  const float* common;  // or null: 1
};
void launch_scale_rows(const ScaleRows& s, const Queue& queue);

// ---- store_matrix.cu
// to [rows, columns] = (accumulate ? to : 0) + from
void launch_store_matrix(const ConstMatrix& from, const Matrix& to, int64_t rows, int64_t columns,
                         bool accumulate, const Queue& queue);

// ---- store_hidden.cu
// Terms of a sum that a product has left out, as they would have cost it more than they cost here: dz [rows,
// count] times matrix [count, columns], both of a 16-bit dtype, rows of matrix at multiples of 16 bytes. At
// most kMostTerms.
inline constexpr int kMostTerms = 7;
struct Terms {
  int64_t count = 0;
  ConstMatrix dz, matrix;
};
// d_hidden of the caller's rows from fp32 sums of computed ones (float64 sums where it is that), times
// factor[row] (null: 1) and dz_unscale.
struct StoreHidden {
  Terms terms;
  ConstMatrix from;
  const int32_t* row_map;
  const int32_t* row_count;
  const float* factor;
  int64_t rows, columns;
  Matrix to;
  bool accumulate;
  bool zeroes_ignored;  // all of the caller's rows that are not computed become 0
};
void launch_store_d_hidden(const StoreHidden& s, const RowTargets& in, const Scalars* scalars,
                           const Queue& queue);
// Rows at any distance: cudaMemset2D takes none of 2^31 bytes.
void launch_zero_rows(const Matrix& matrix, int64_t rows, int64_t columns, const Queue& queue);
// sums[j] = (adds ? sums[j] : 0) + *factor * sum_r row_factor[r] * dz[r, j] over existing rows
struct ColumnSums {
  ConstMatrix dz;
  int64_t rows, columns;
  const int32_t* row_count;
  const float *row_factor, *factor;  // either null: 1
  void* sums;                        // of fp32, or float64 as dz
  bool adds;
  // In place of sums, if given: to[j] = (accumulate ? to[j] : 0) + that sum * to_factor
  Matrix to;
  double to_factor;
  bool accumulate;
};
void launch_column_sums(const ColumnSums& c, const Queue& queue);
// to[j] = (accumulate ? to : 0) + from[j] * factor; from: as StoreHidden's
void launch_store_vector(const void* from, int64_t count, double factor, void* to, DType dtype,
                         bool accumulate, const Queue& queue);

// ---- dot_products.cu
// Queues C = A B^T in fp32, where an element's bits are those of its row of A and its row of B alone, as its
// sum has the order of k. cuBLASLt offers no algorithm that takes all sizes; without tensor cores this is
// some ten times slower than the best of its. Of g: m, n, k, operands, strides, and C in fp32.
void launch_dot_products(const Gemm& g, const Queue& queue);

// As Backend::scale; reads and writes nothing but the factor when that is 1.
void launch_scale_unless_one(std::span<const GradientArray> arrays, const void* factor, const Queue& queue);

// As Backend::divergence; there are rows, and at most 2^31 - 1.
void launch_divergence(const Divergence& divergence, const Queue& queue);

}  // namespace logitless::cuda
