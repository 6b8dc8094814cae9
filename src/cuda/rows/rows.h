#pragma once
// Work on N-vectors, and copies around the products. Every launcher only queues; pointers are on the device.
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
struct NoiseLists;
}  // namespace logitless

namespace logitless::cuda {

struct Gemm;
class Queue;

// Targets and the loss, as row kernels read them.
struct RowTargets : Problem {
  const void* targets;
  bool wide_targets;        // int64
  LossParams<double> loss;  // without class_weight_sum, which only the device knows: known_loss()
  bool is_none;             // the reduction
  // With targets_per_row; `targets` are then the joined targets (JoinedTargets).
  const void* row_targets;          // [tokens, targets_per_row]
  bool wide_row_targets;            // int64
  const double* target_weight_sum;  // [tokens], of the weights of a row of targets
};
// Targets, the loss and its weights. Real: as in ArenaOf.
template <class Real>
struct RowInputsOf : RowTargets {
  const Real* class_weight;   // [vocab_total] or null
  const Real* token_weight;   // [tokens] or null
  const Real* temperature;    // [tokens] or null
  const Real* num_items_at;   // replaces num_items, or null
  const Real* target_weight;  // [tokens, targets_per_row]; null: ones
};
using RowInputs = RowInputsOf<float>;
template <class Real>
RowInputsOf<Real> row_inputs(const Problem& problem, const Buffers& buffers, const JoinedTargets& joined);

// ---- prepare.cu
//
// Makes row_map, target, inverse_temperature, scalars and chunk_rows. compact: ignored rows are left out.
// Otherwise all rows stay in place, and ignored ones get kIgnoredRow. fills: outputs of rows that are not
// computed become 0, or NaN if the target is out of range.
template <class Real>
void launch_prepare_rows(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, int64_t chunk, bool compact,
                         bool fills, const Buffers& out, const Queue& queue);

// ---- row_targets.cu: several targets a row
template <class Real>
void launch_join_targets(const RowInputsOf<Real>& in, const JoinedTargets& to, const Queue& queue);
// Logits of the targets of a chunk's rows, with operands as the products see them. They are 0 for
// ignore_index and for targets in other shards.
template <class Real>
struct TargetLogits {
  int64_t rows, columns;
  const int32_t *row_count, *row_map, *target;  // of the chunk
  ConstMatrix hidden, weight;                   // the caller's
  DType operand_dtype;                          // numbers are rounded to it
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
  bool are_exp_logits;             // the stored value times row_factor is dz
  const float* scale;              // otherwise dz is stored times scale; null: 1
  LogitTransform<Real> transform;  // of the computed rows
};
template <class Real>
void launch_target_entries(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena,
                           const TargetEntries<Real>& e, const Queue& queue);

// Puts arena.replaced back into saved exp logits, of which all rows are one chunk.
struct RestoreExpLogits {
  Matrix exp_logits;
  int64_t rows, columns;
  const int32_t* row_count;
};
void launch_restore_exp_logits(const RowInputs& in, const Arena& arena, const RestoreExpLogits& e,
                               const Queue& queue);

// Writes Buffers::kept_count, draw_variance and loss_error for a sparsified problem with an exact plan.
void launch_exact_draw_stats(const RowTargets& in, int64_t columns, const Buffers& out, const Queue& queue);

// ---- load.cu: everything that a chunk's first product needs
template <class Real>
struct LoadRows {
  int64_t rows;
  const int32_t* row_count;  // rows from here on become 0; null: all exist
  // Copies of the rows [rows, padded]; null: no copies.
  Matrix to;
  int64_t padded;
  ConstMatrix from;  // null: neither copies nor logits
  int64_t columns;
  const int32_t* row_map;  // [rows] the row of `from` for each row
  // z at the targets (0 if the target is in another shard), which also become the logit offsets; null: not
  // wanted.
  Real* target_logit;              // [rows]
  float* logit_offset;             // [rows]
  const int32_t* target;           // [rows]
  ConstMatrix weight;              // the caller's
  LogitTransform<Real> transform;  // its bias is not read: that may be the copy
  const void* bias;                // [vocab] or null
  DType bias_dtype;
  Real bias_scale;
  Real* bias_copy;  // [vocab] times bias_scale, or null
  int64_t vocab;
  PartialStatsOf<Real> partials;  // cleared; sum null: not wanted
  // Cleared rows of a matrix: those that do not exist but are read by products. [rows, tail_pieces] pieces of
  // 16 bytes; or null.
  void* tail;
  int64_t tail_pieces;
};
template <class Real>
void launch_load_rows(const LoadRows<Real>& l, const Queue& queue);

// The allowed range of a row's sum of exp logits relative to a logit offset.
struct SumRange {
  double least, most;
};

// ---- redo.cu: blocks of kept exp logits that are done again
//
// Returns whether sums of exp logits may leave their range. They are relative to one of the row's own logits,
// so they are not below 1. No logit is more than most_above_offset above it.
bool may_leave_range(double most_above_offset, int64_t vocab, const PartialStats& partials);
// Finds rows whose relative_to_offset sums left the range of exp logits: makes their logit offsets NaN, sets
// `active` of their blocks and clears the blocks' partials. target: [rows]; needed because ignored rows have
// no sums.
void launch_find_redo(const Arena& arena, int64_t rows, const int32_t* row_count, const int32_t* target,
                      const Queue& queue);
// Sets logit_offset and lse_residual in active blocks, from the lse of the joined partials. again: called
// after find_redo and new sums. Then only the rows that it found are set, so that the sums of others stay
// valid, and the partials are cleared. in_group: rows whose exp logits are all 0 get the logit offset 0,
// because other ranks may have some.
void launch_offset_from_partials(const Arena& arena, int64_t rows, const int32_t* row_count, bool again,
                                 const Queue& queue, bool in_group = false);

// ---- finish.cu: everything between a chunk's statistics and its gradients, in one pass over its rows
//
// Joins the partials of a chunk's rows, and writes their outputs, row_loss and lse.
struct FinishRows {
  bool wanted;
  bool relative_to_offset, has_max;  // to arena.logit_offset; whether the partials also hold maxima
  bool base_2;                       // exp logits are powers of 2, relative to rounded_offset()
  float sum_unit;                    // factor of the kept exp logits
  bool is_shard;                     // a shard without a group: no losses
  GroupStats group;                  // statistics of all ranks, instead of the partials
  bool writes_loss;                  // the last chunk: loss (reduced) and correct_count from row_loss of all
};
template <class Real>
struct Coefficients {
  bool wanted;
  Real scale;                      // of the gradients: the factor between logits and products
  const Real* known_lse;           // [N] of the caller's rows; null: arena.lse
  const Real* known_lse_residual;  // [N]; null: 0
  const Real* entropy;             // [N] or null
  const Real* grad_loss;           // scalar or [N]; null: 1
#define LOGITLESS_MEMBER(name) const Real* grad_##name;  // [N] or null
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  bool scale_dz;  // dz will have 16 bits: find the factor that makes the largest coefficient 1
};
// Kept exp logits. row_factor becomes a / kept_sum (all in the units of the stored values). The target's
// entry becomes exp - g / row_factor. So exp logits times row_factor are dz.
struct CachedExpLogits {
  Matrix exp_logits;                // null: none are kept
  int64_t columns;                  // the first ones, whose exp logits are kept
  LogitTransform<float> transform;  // of the computed rows
  // Rows of the operands, which are multiplied by their row_factor; or null.
  Matrix hidden;  // [rows, depth]
  int64_t depth;
};
template <class Real>
struct FinishChunkOf {
  int64_t first, rows;  // at most `rows` of them exist
  const int32_t* row_count;
  FinishRows stats;
  Coefficients<Real> coefficients;
  CachedExpLogits kept;  // none with float64
};
using FinishChunk = FinishChunkOf<float>;
// Writes this rank's part of the exchanged statistics, from the partials of a chunk.
void launch_group_stats(const RowInputs& in, const Arena& arena, const FinishChunk& f, const GroupStats& mine,
                        const Queue& queue);
// Writes where this rank's columns lie, and a digest of the targets and of vocab_total.
void launch_group_cut(const RowTargets& in, const GroupStats& mine, const Queue& queue);
// Checks the ranks' cuts in the first chunk. If they do not cut one vocabulary, or if targets differ, the
// divisor of all losses and gradients becomes NaN. So do the statistics of the rows of this chunk and of
// later ones.
void launch_check_cuts(const RowTargets& in, const Arena& arena, const GroupStats& all, bool is_first,
                       int64_t rows, const Queue& queue);
template <class Real>
void launch_finish_chunk(const RowInputsOf<Real>& in, const ArenaOf<Real>& arena, const Buffers& out,
                         const FinishChunkOf<Real>& f, const Queue& queue);

// ---- copies.cu
//
// A condition that only the device knows: one of these bytes is not 0. Null: it holds.
struct Condition {
  const void* bytes = nullptr;
  int64_t count = 0;
};
// A copy of rows. If the condition does not hold, nothing is read or written.
struct RowsCopy {
  ConstMatrix from;
  const int32_t* row_map;    // the row of `from` for each row; null: in order
  const int32_t* row_count;  // rows from here on become 0; null: all exist
  Matrix to;
  const int32_t* target;          // rows of kIgnoredRow become 0; null: none
  int64_t rows, columns, padded;  // columns to copy; up to padded become 0
  Condition condition;
};
void launch_copy_rows(const RowsCopy& c, const Queue& queue);

// Scales rows in place by factor[row] and *common; rows that do not exist become 0.
struct ScaleRows {
  Matrix matrix;
  int64_t rows, columns;
  const int32_t* row_count;
  const float* factor;
  const float* common;  // null: 1
};
void launch_scale_rows(const ScaleRows& s, const Queue& queue);

// ---- screen_rows.cu
//
// Copies rows of float32 or 16 bits rounded to e4m3 (core/fp8.h): into e4m3 numbers with a factor for
// each row in factor[rows], or into bf16 with the factors multiplied in, and `factor` null. Rows that become
// 0 have the factor 1. Rows of the copy begin at multiples of 16 bytes, and so does what lies behind
// `padded`.
void launch_screen_rows(const RowsCopy& c, float* factor, const Queue& queue);

// ---- store_matrix.cu
//
// to [rows, columns] = (accumulate ? to : 0) + from
void launch_store_matrix(const ConstMatrix& from, const Matrix& to, int64_t rows, int64_t columns,
                         bool accumulate, const Queue& queue);

// ---- store_hidden.cu
//
// Terms of a sum that are not part of a product, because they would cost it more than they cost here: dz
// [rows, count] times matrix [count, columns]. Both have a 16-bit dtype, and rows of matrix begin at
// multiples of 16 bytes. At most kMostTerms.
inline constexpr int kMostTerms = 7;
struct Terms {
  int64_t count = 0;
  ConstMatrix dz, matrix;
};
// A product of two vectors to add: element (row, d) is row_factor[row] * sum[d]; sum null: nothing.
struct Smoothing {
  const float* row_factor = nullptr;  // null: 1
  const float* sum = nullptr;
};
// Stores d_hidden of the caller's rows from sums of computed rows, in fp32 or for float64 in float64, times
// factor[row] (null: 1) and dz_unscale, plus smoothing.
struct StoreHidden {
  Terms terms;
  Smoothing smoothing;  // not with float64
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
// Clears rows at any distance: cudaMemset2D does not accept 2^31 bytes.
void launch_zero_rows(const Matrix& matrix, int64_t rows, int64_t columns, const Queue& queue);
// sums[j] = (adds ? sums[j] : 0) + *factor * sum_r (row_factor[r] * dz[r, j] + c[r] * column_weight[j]) over
// existing rows
struct ColumnSums {
  ConstMatrix dz;
  int64_t rows, columns;
  const int32_t* row_count;
  const float *row_factor, *factor;  // either null: 1
  const float* c;                    // [rows] label smoothing's part of dz, or null: 0
  const float* column_weight;        // [columns] or null: ones
  void* sums;                        // in fp32, or in float64 like dz
  bool adds;
  // If `to` is given, it is written instead of sums: to[j] = (accumulate ? to[j] : 0) + that sum * to_factor
  Matrix to;
  double to_factor;
  bool accumulate;
};
void launch_column_sums(const ColumnSums& c, const Queue& queue);
// to[j] = (accumulate ? to : 0) + from[j] * factor; from: as StoreHidden's
void launch_store_vector(const void* from, int64_t count, double factor, void* to, DType dtype,
                         bool accumulate, const Queue& queue);

// ---- smoothing.cu: label smoothing's part of dz, c_i w_j, is a product of two vectors
//
// sum[d] = sum over rows of weight * data, in a fixed order; weight null: 1. fp32 data are rounded to
// operand_dtype. parts: [kSumParts, columns] scratch.
struct WeightedRows {
  ConstMatrix data;
  DType operand_dtype;
  int64_t rows, columns;
  // The row of data for each row, and how many exist; null: in order, all.
  const int32_t *row_map = nullptr, *row_count = nullptr;
  const float* weight;  // [rows] or null
  float* parts;
  float* sum;  // [columns]
};
void launch_weighted_rows(const WeightedRows& w, const Queue& queue);
// sums[i] = sum_j w_j z_ij = (scale * hidden_i . weight_sum + sum_j w_j bias_j) / T_i. Rows that are ignored
// or do not exist stay unchanged.
struct WeightedLogits {
  ConstMatrix hidden;
  int64_t rows, columns;
  const int32_t* row_count;
  const int32_t* target;  // [rows]
  LogitTransform<float> transform;
  const float* class_weight;  // [vocab] or null: ones
  int64_t vocab;
  const float* weight_sum;  // [columns]
  float* bias_sum;          // scratch: one number
  float* sums;              // [rows]
};
void launch_weighted_logits(const WeightedLogits& w, const Queue& queue);
// d_bias[j] += w_j * sum_i c_i
struct SmoothBias {
  const float* c;  // [rows]
  int64_t rows;
  const float* column_weight;  // [columns] or null: ones
  int64_t columns;
  float* d_bias;  // [columns]
};
void launch_smooth_bias(const SmoothBias& s, const Queue& queue);
// Writes further rows of both operands of a product exp_logits^T hidden, which add w_j * hidden_sum[d] to it.
// Each vector is the sum of two of their dtype.
struct SmoothingRows {
  Matrix exp_logits, hidden;   // of one dtype; null: its rows stay
  int64_t row;                 // the first one
  int64_t columns;             // of exp_logits
  int64_t width, depth;        // of hidden; zeros behind width
  const float* column_weight;  // [columns] or null: ones
  const float* hidden_sum;     // [width]
};
void launch_smoothing_rows(const SmoothingRows& s, const Queue& queue);

// ---- make_dz.cu
//
// Turns kept exp logits into dz where a factor for each row is not enough. With b or c, logits are linear.
// The sums of exp logits are in arena.kept_sum. Entries of several targets come later.
struct MakeDz {
  ConstMatrix exp_logits;         // [rows, columns], rows are pieces of 16 bytes
  Exponents exponents;            // from column 0 of the shard on; with float16
  Matrix dz;                      // as exp_logits; may be these
  int64_t first, rows;            // of the chunk
  int64_t first_column, columns;  // of the window, in the shard
  const int32_t* row_count;
  const float* column_weight;       // [columns] or null: ones
  LogitTransform<float> transform;  // of the computed rows
  const float* scale;               // scalar; null: 1
};
void launch_make_dz(const Arena& arena, const MakeDz& m, const Queue& queue);
// ---- dot_products.cu
//
// Rows of a product that exist, as the device knows them. The others stay as they are.
struct ExistingRows {
  const int32_t* count = nullptr;         // scalar: rows from here on do not exist; null: all exist
  const uint8_t* block_active = nullptr;  // one flag for kRowBlock rows; 0: they do not exist; null: all do
  int64_t first = 0;                      // number of the product's first row
};
// Queues C = A B^T in fp32, or in float64 for such operands. An element's bits depend only on its row of A
// and its row of B, because its sum has the order of k. cuBLASLt offers no such algorithm for all sizes.
// Operands of 16 bits go through tensor cores; for others this is about ten times slower than cuBLASLt's
// best. Without existing rows it costs a launch. Reads g's m, n, k, operands and strides.
void launch_dot_products(const Gemm& g, const ExistingRows& rows, const Queue& queue);

// Implements Backend::scale. If the factor is 1, only the factor is read and nothing is written.
void launch_scale_unless_one(std::span<const GradientArray> arrays, const void* factor, const Queue& queue);

// Implements Backend::noise.
void launch_noise(const NoiseLists& lists, const Queue& queue);
// Implements Backend::divergence, for 1 to 2^31 - 1 rows.
void launch_divergence(const Divergence& divergence, const Queue& queue);

}  // namespace logitless::cuda
