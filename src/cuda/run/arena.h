#pragma once
#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/engines/logits.h"
#include "cuda/plan/plan_detail.h"
#include "cuda/run/top/sizes.h"

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
  uint32_t passed;    // blocks of the kernel that runs (is_last_block())
  float zero_one[2];  // constants for products with scalars of the device
};

// For each row of several targets, as given: one that is out of range, else the first that is not
// ignore_index, else that; and the sum of the weights. [N] each, of the caller's rows of targets.
struct JoinedTargets {
  int64_t* target = nullptr;
  double* weight_sum = nullptr;
};

// dtype of both operands of the logits' product, to which others are converted, and of kept exp_logits and
// dz: the problem's compute_dtype, that of both operands, or fp32.
DType operand_dtype(const Problem& problem);
// Length of a copied row: hidden where that is whole pieces of 16 bytes or of float64, or else rounded up to
// lines of 128.
int64_t padded_hidden(const Problem& problem);
// Length of a row of a sparsified run's dense columns, whole pieces of 16 bytes.
int64_t padded_columns(const Problem& problem, int64_t columns);
// Whether hidden rows, as operands, may lie in the buffer of d_hidden until the gradient is written there:
// row by row in the same place, whose rows may be longer. And the distance between them there.
bool fits_in_d_hidden(const Problem& problem);
int64_t operand_stride_in_d_hidden(const Problem& problem, const Buffers& buffers);
// Whether a product can write d_weight in its own dtype, and in rows of whole 16 bytes.
bool writes_d_weight(const Problem& problem);
// Else a product writes a window of it in this dtype, and a copy follows: where the copy of the weight's
// window was, or apart from it.
DType staging_dtype(const Problem& problem);
bool stages_apart(const Problem& problem);

// Length of a row of the exp_logits that are kept, and of the dz that takes their place: one, so that rows
// which do not exist stay 0.
int64_t exp_logits_stride(const Problem& problem, const PlanDetail& detail);
// Columns of kept exp_logits that products take at once: all, where weight and d_weight are as they need
// them.
int64_t kept_window(const Problem& problem, const PlanDetail& detail);

// What the ranks of a group tell each other of rows: [ranks][numbers][rows] in one array, so that a rank is a
// partial of whole rows, and kCutNumbers behind each rank's. Of a partial's statistics argmax is a global id.
struct GroupStats {
  PartialStats partials;          // as many as ranks; 0: no group
  float* target_logit = nullptr;  // as the partials: 0 where the target is in another shard
  // [top_k, rows] of a partial: the largest logits of its columns, in order; the id -1 where columns are
  // fewer.
  float* top_logit = nullptr;
  int32_t* top_id = nullptr;
  uint32_t* cut = nullptr;  // [kCutNumbers] of a partial
};
GroupStats group_stats(const Problem& problem, float* gathered, int64_t rows);

// What a run needs beyond inputs and outputs. N tokens, R rows of a chunk of them, W columns of a window.
// Real: the type of sums and of rows' numbers; double where operands are float64, else float.
template <class Real>
struct ArenaOf {
  Scalars* scalars = nullptr;
  int32_t* chunk_rows = nullptr;  // [chunks] how many rows of each chunk exist
  int32_t* row_map = nullptr;     // [N] the caller's row of each computed row, ascending
  int32_t* target = nullptr;  // [N] of the computed rows: column of the shard, -1 elsewhere, or kIgnoredRow
  Real* row_loss = nullptr;   // [N] of the computed rows
  Real* target_logit = nullptr;         // [R]
  JoinedTargets joined;                 // with several targets a row, as the next
  Real* target_logits = nullptr;        // [R, targets_per_row]
  Real* bias = nullptr;                 // [V] times bias_scale, where the caller's is not that
  Real* inverse_temperature = nullptr;  // [N] of the computed rows; null: ones
  PartialStatsOf<Real> partials;
  float* gathered = nullptr;                                    // [ranks, numbers of R rows] GroupStats
  float* logit_offset = nullptr;                                // [R]
  uint8_t* active = nullptr;                                    // one for 128 of the R rows
  Real *lse = nullptr, *lse_residual = nullptr;                 // [R] together lse
  Real *a = nullptr, *b = nullptr, *c = nullptr, *g = nullptr;  // [R]
  float* row_factor = nullptr;  // [R] by which kept exp_logits become gradients
  void* hidden = nullptr;       // [R, padded]
  void* window = nullptr;       // [W, padded] of the weight
  void* exp_logits = nullptr;   // [R, padded] kept exp_logits, and then dz of a window
  Real* d_hidden = nullptr;     // [R, padded]
  Real* d_weight = nullptr;     // [V, padded] the sum over chunks
  void* staging = nullptr;      // [W, padded] of d_weight, where no product writes its rows
  Real* d_bias = nullptr;       // [V]
  TopArenaOf<Real> top;
  Real* logits = nullptr;  // LogitsScratch
  void* gemm = nullptr;
};
using Arena = ArenaOf<float>;

// The part that all plans have.
template <class Real>
ArenaOf<Real> lay_out_rows(const Problem& problem, const PlanDetail& detail, Workspace& workspace);

// Pieces of a workspace.
template <class T>
T* take(Workspace& workspace, int64_t count) {
  return workspace.take<T>(count).data();
}
inline void* take_elements(Workspace& workspace, DType dtype, int64_t count) {
  return take<std::byte>(workspace, count * static_cast<int64_t>(size_of(dtype)));
}

}  // namespace logitless::cuda
