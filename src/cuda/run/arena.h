#pragma once
#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/engines/logits.h"
#include "cuda/plan/plan_detail.h"
#include "cuda/run/top/sizes.h"
#include "cuda/runtime/matrix.h"

namespace logitless::cuda {

// Numbers that only the device knows.
struct Scalars {
  double divisor;           // of the mean
  double class_weight_sum;  // sum_j w_j
  int64_t valid_count;
  int64_t invalid_count;
  int64_t first_invalid;
  unsigned long long correct_count;
  int32_t row_count;  // rows that are computed
  uint32_t dz_max;    // bits of the largest |coefficient|
  float dz_scale;     // factor of stored dz, which makes the largest coefficient 1
  float dz_unscale;   // 1 / dz_scale
  uint32_t passed;    // finished blocks of the running kernel (is_last_block())
  float zero_one[2];  // constants for products with scalars on the device
};

// Each row of several targets joined to one target: an out-of-range target if there is one, else the first
// that is not ignore_index, else ignore_index. weight_sum adds up the weights. Both are [N] in the caller's
// order.
struct JoinedTargets {
  int64_t* target = nullptr;
  double* weight_sum = nullptr;
};

// Returns the dtype of both operands of the logits' product, of kept exp logits and of dz. It is
// compute_dtype unless that is fp32, else the operands' common dtype, else fp32. Other operands are converted
// to it.
DType operand_dtype(const Problem& problem);
// Returns the length of a copied row. It is `hidden` if that is whole pieces of 16 bytes or float64, else
// `hidden` rounded up to lines of 128 bytes.
int64_t padded_hidden(const Problem& problem);
// Returns the length of a row of a sparsified run's dense columns, in whole pieces of 16 bytes.
int64_t padded_columns(const Problem& problem, int64_t columns);
// Returns whether hidden rows, as operands, fit into the buffer of d_hidden until the gradient is written
// there. They lie row by row in the gradient's places, whose rows may be longer. The second function returns
// the distance between them.
bool fits_in_d_hidden(const Problem& problem);
int64_t operand_stride_in_d_hidden(const Problem& problem, const Buffers& buffers);
// Returns whether a product can write d_weight in its own dtype, in rows of whole 16 bytes.
bool writes_d_weight(const Problem& problem);
// If not, a product writes a window of d_weight in the staging dtype, and a copy follows. stages_apart()
// returns whether that window has its own buffer. If not, it takes the place of the copied weight's window.
DType staging_dtype(const Problem& problem);
bool stages_apart(const Problem& problem);

// Returns whether exp logits pass from a forward run to backward runs, in Buffers::saved.
bool saves_exp_logits(const Problem& problem, const PlanDetail& detail);
// Returns the length of a row of the kept exp logits, and of a window's dz; 0: there is none. It is one
// length where dz takes the place of exp logits, so that rows which do not exist stay 0.
int64_t exp_logits_stride(const Problem& problem, const PlanDetail& detail);
int64_t dz_stride(const Problem& problem, const PlanDetail& detail);
// Returns the bytes from the beginning of a row of kept exp logits to the row's Exponents.
int64_t bytes_before_exponents(const Problem& problem, const PlanDetail& detail);
// Returns how many columns of kept exp logits products take at once: all, if the products can use weight and
// d_weight in place.
int64_t kept_window(const Problem& problem, const PlanDetail& detail);

// The statistics that the ranks of a group exchange: [ranks][numbers][rows] in one array, so that a rank is a
// partial of whole rows. Each rank's kCutNumbers follow its numbers. argmax is a global id.
struct GroupStats {
  PartialStats partials;          // as many as ranks; 0: no group
  float* target_logit = nullptr;  // as the partials; 0 if the target is in another shard
  // [k, rows] of a partial: the largest logits of its columns, in order. With too few columns the id is
  // -1.
  float* top_logit = nullptr;
  int32_t* top_id = nullptr;
  uint32_t* cut = nullptr;  // [kCutNumbers] of a partial
};
GroupStats group_stats(const Problem& problem, float* gathered, int64_t rows);

// Rows of operands that are rounded to e4m3 for products of logits (core/fp8.h). They begin at multiples of
// kRoundedAlignment bytes.
inline constexpr int64_t kRoundedAlignment = 16;
struct RoundedWeight {
  Matrix rows;
  float* factor = nullptr;  // one a row with e4m3
  RoundedWeight from(int64_t row) const {
    return {rows.from(row), factor == nullptr ? nullptr : factor + row};
  }
};
struct RoundedRows {
  DType dtype = DType::kBF16;      // rounded_dtype()
  int64_t stride = 0;              // elements between rows
  void* hidden = nullptr;          // [R, stride]
  float* hidden_factor = nullptr;  // [R] with e4m3
  RoundedWeight weight;            // [window, stride]
};
// Their dtype with an engine (EngineTraits::has_e4m3): bf16 holds e4m3 numbers with their factors.
constexpr DType rounded_dtype(bool has_e4m3) {
  return has_e4m3 ? DType::kE4M3 : DType::kBF16;
}
inline int64_t rounded_stride(const Problem& problem) {
  return (problem.hidden + 15) / kRoundedAlignment * kRoundedAlignment;
}
// Takes rounded rows of the weight, and factors of as many or more.
RoundedWeight take_rounded_weight(const Problem& problem, DType dtype, int64_t rows, Workspace& workspace,
                                  int64_t factors = 0);
// window: rows of the weight at a time; factors: as many of the weight are kept.
RoundedRows lay_out_rounded(const Problem& problem, const PlanDetail& detail, int64_t rows, int64_t window,
                            int64_t factors, Workspace& workspace);

// Parts of a sum over rows, each with a fixed order.
inline constexpr int64_t kSumParts = 128;

// The workspace of a run. N: tokens, R: rows of a chunk, W: columns of a window. Real is the type of sums and
// of numbers per row: double with float64 operands, else float.
template <class Real>
struct ArenaOf {
  Scalars* scalars = nullptr;
  int32_t* chunk_rows = nullptr;  // [chunks] number of existing rows of each chunk
  int32_t* row_map = nullptr;     // [N] the caller's row of each computed row, ascending
  int32_t* target = nullptr;  // [N] of the computed rows: column of the shard, -1 elsewhere, or kIgnoredRow
  Real* row_loss = nullptr;   // [N] of the computed rows
  Real* target_logit = nullptr;         // [R]
  JoinedTargets joined;                 // with several targets a row, like the next
  Real* target_logits = nullptr;        // [R, targets_per_row]
  Real* bias = nullptr;                 // [V] times bias_scale, if the caller's bias cannot be used directly
  Real* inverse_temperature = nullptr;  // [N] of the computed rows; null: ones
  PartialStatsOf<Real> partials;
  float* gathered = nullptr;                                    // [ranks, numbers of R rows] GroupStats
  float* logit_offset = nullptr;                                // [R]
  uint8_t* active = nullptr;                                    // one flag for 128 of the R rows
  Real *lse = nullptr, *lse_residual = nullptr;                 // [R] their sum is lse
  Real *a = nullptr, *b = nullptr, *c = nullptr, *g = nullptr;  // [R]
  float* kept_sum = nullptr;    // [R] sum of a row's exp logits, in the units of the kept ones
  float* target_exp = nullptr;  // [R] unrounded exp logit of the row's target, in these units
  float* row_factor = nullptr;  // [R] factors that make kept exp logits gradients; may be kept_sum
  void* hidden = nullptr;       // [R, padded]; with further rows, like the next
  void* window = nullptr;       // [W, padded] of the weight
  void* exp_logits = nullptr;   // [R, padded] kept exp logits
  void* replaced = nullptr;     // [R, targets] their elements at the targets; null: nobody reads these again
  void* dz = nullptr;           // [R, padded] of a window; may be exp_logits
  RoundedRows rounded;          // where logits are products of rounded rows, all or those of a screen
  Real* d_hidden = nullptr;     // [R, padded]
  Real* d_weight = nullptr;     // [V, padded] the sum over chunks
  void* staging = nullptr;      // [W, padded] of d_weight, if no product writes its rows
  Real* d_bias = nullptr;       // [V]
  // With label smoothing, unless logits are summed.
  float* sum_parts = nullptr;   // [kSumParts, D]
  float* weight_sum = nullptr;  // [D] sum_j w_j C_j
  float* kept_sum_of_weight =
      nullptr;                  // [D] that of the columns whose exp logits are kept; may be weight_sum
  float* hidden_sum = nullptr;  // [D] sum_i c_i E_i
  TopArenaOf<Real> top;
  SampleKey* sample_key = nullptr;            // [R, num_samples]
  unsigned long long* sample_best = nullptr;  // likewise: Samples
  Real* logits = nullptr;                     // LogitsScratch
  void* gemm = nullptr;
};
using Arena = ArenaOf<float>;

// Lays out the part that all plans share.
template <class Real>
ArenaOf<Real> lay_out_rows(const Problem& problem, const PlanDetail& detail, Workspace& workspace);

// Whether kept exp logits have Exponents.
inline bool has_exponents(const Problem& problem) {
  return operand_dtype(problem) == DType::kF16;
}
// Whether a factor for each row does not make gradients of kept exp logits. They then become dz, saved ones
// window by window.
inline bool exp_logits_become_dz(const Problem& problem) {
  return problem.has.grad_entropy || has_exponents(problem);
}
// Whether label smoothing's part of dz, c_i w_j, stays apart from exp logits: d_hidden gets a product of two
// vectors, and both operands of d_weight get kSmoothingRows further rows.
inline bool smooths_apart(const Problem& problem) {
  return problem.smooths() && !exp_logits_become_dz(problem);
}
inline constexpr int64_t kSmoothingRows = 4;
// Whether operands have room for these rows. Upstream gradients do not decide about it, and with Exponents no
// pass needs them.
inline bool has_smoothing_rows(const Problem& problem) {
  return problem.smooths() && !has_exponents(problem);
}
// Takes what sum_weighted_logits() needs, and the sum that it leaves from the last one.
void take_weight_sums(const Problem& problem, Arena& arena, Workspace& workspace, Workspace& of_sum);

// Takes a piece of a workspace.
template <class T>
T* take(Workspace& workspace, int64_t count) {
  return workspace.take<T>(count).data();
}
inline void* take_elements(Workspace& workspace, DType dtype, int64_t count) {
  return take<std::byte>(workspace, count * static_cast<int64_t>(size_of(dtype)));
}

}  // namespace logitless::cuda
