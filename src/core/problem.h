#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/row_lists.h"

namespace logitless {

enum class Reduction : int { kNone = 0, kSum = 1, kMean = 2 };

// What a run computes.
enum class Pass : int {
  kForward = 0,          // row statistics, and from them the losses (the losses not for a vocabulary shard)
  kBackward = 1,         // gradients, from lse (and entropy) of an earlier forward and any upstream gradients
  kForwardBackward = 2,  // both in one run; upstream gradients are those of the reduced loss only
};

// How gradients are made; the loss is the same.
enum class GradientMethod : int {
  kExact = 0,
  kThinned = 1,        // an unbiased draw, see core/thinning.h; a plan may be exact where that is no slower
  kAlwaysThinned = 2,  // the draw in any case
};

// What becomes of the parts of d_hidden of the ranks of a group; numbered as logitless_group_d_hidden.
enum class GroupDHidden : int {
  kPart = 0,      // nothing
  kSum = 1,       // their sum, on every rank
  kSumOfOwn = 2,  // on every rank the sum of its part of the rows
};

inline constexpr int64_t kMostTargetsPerRow = 64;

// Everything a plan depends on. Shapes and meanings: N tokens, V rows of the classifier at hand, D hidden.
//   z_ij  = t(scale * (E_i . C_j) + bias_scale * bias_j) / T_i,  t = identity, or softcap * tanh(. / softcap)
//   loss_i = token_weight_i * [ (1 - label_smoothing) * w_y * nll_i
//            + label_smoothing / V_total * sum_j w_j (lse_i - z_ij) + z_loss * lse_i^2 ]
// with w the class weights (all one without) and T_i the row's temperature (1 without). Reductions: none [N];
// sum; mean = sum / divisor where the divisor is num_items when given, else sum over valid rows of
// token_weight_i * w_y.
// With targets_per_row = K a row has K targets y_k of the weights q_k (all one without), and
//   nll_i = sum_k q_k (lse_i - z_iy_k)
// in the place of lse_i - z_iy; w is 1, as is w_y in the divisor. A target of ignore_index is none, and a row
// of such targets alone is ignored.
struct Problem {
  Pass pass = Pass::kForward;
  int64_t tokens = 0;  // N
  int64_t vocab = 0;   // V, rows of the classifier at hand
  int64_t hidden = 0;  // D

  // A vocabulary shard holds the rows [vocab_start, vocab_start + vocab) of vocab_total; targets are global.
  int64_t vocab_start = 0;
  int64_t vocab_total = 0;
  // A shard of a group of ranks that run at the same time and exchange row statistics, so that all that is
  // told is of the whole vocabulary; vocab may be 0. 0: none.
  int group_size = 0;
  int64_t group_vocab = 0;  // of the largest shard, by which all ranks plan
  GroupDHidden group_d_hidden = GroupDHidden::kPart;

  DType hidden_dtype = DType::kF32;
  DType classifier_dtype = DType::kF32;
  DType bias_dtype = DType::kF32;
  DType target_dtype = DType::kI64;
  DType d_hidden_dtype = DType::kF32;
  DType d_classifier_dtype = DType::kF32;
  DType d_bias_dtype = DType::kF32;
  // bf16 or fp16: operands of the products are rounded to it; kF32: they are not.
  DType compute_dtype = DType::kF32;
  bool allow_tf32 = false;  // a permission to round fp32 operands further, where that is faster

  double scale = 1;
  double softcap = 0;  // 0: none
  // One temperature of all rows. validated() turns it into scale, softcap and bias_scale, over T each: since
  // t(x) / T is t(x / T) with the softcap over T, there is none (1) behind it.
  double temperature = 1;
  double bias_scale = 1;
  double label_smoothing = 0;
  double z_loss = 0;
  double num_items = 0;  // 0: none
  Reduction reduction = Reduction::kMean;
  int64_t ignore_index = -100;
  // Row (b, s) of sequences of length sequence_length predicts targets[b, s + shift]; rows without one are
  // ignored.
  int64_t shift = 0;
  int64_t sequence_length = 0;  // 0: all tokens are one sequence

  // Rows of hidden, classifier or d_hidden do not all begin at multiples of 16 bytes although their size is
  // one.
  bool unaligned_rows = false;

  bool has_bias = false;
  bool has_class_weight = false;
  bool has_token_weight = false;
  bool has_temperature = false;  // a T_i for each row, Buffers::temperature
  int64_t targets_per_row = 0;   // K; 0: one target a row, without a weight of its own
#define LOGITLESS_MEMBER(name) bool name = false;
  LOGITLESS_ROW_WANTS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  int64_t top_k = 0;  // forward passes: the largest logits of each row, so many; 0: none
  bool want_d_hidden = false;
  bool want_d_classifier = false;
  bool want_d_bias = false;
  // Backward only: which per-token upstream gradients are given besides that of the loss.
#define LOGITLESS_MEMBER(name) bool has_grad_##name = false;
  LOGITLESS_ROW_UPSTREAM(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  // Add to what the gradient buffer holds (fp32 or fp64 buffers only) instead of overwriting it.
  bool accumulate_d_hidden = false;
  bool accumulate_d_classifier = false;
  bool accumulate_d_bias = false;

  // The statistics of a row have the same bits whatever N, the row's place, the budget, the plan and the pass
  // are: the order of their sums follows V, D, dtypes and options alone.
  bool batch_invariant = false;

  GradientMethod gradient = GradientMethod::kExact;
  // Thinned: a forward pass writes Buffers::draws, a backward pass reads them instead of drawing on its own.
  bool keeps_draws = false;
  double threshold = 1;  // thinned: elements p_ij below it are drawn
  int64_t seed = 0;      // thinned; Buffers::seed goes before it

  // Whether the run draws elements or works with drawn ones: not for a plain forward pass.
  bool is_thinned() const {
    return gradient != GradientMethod::kExact && (pass != Pass::kForward || keeps_draws);
  }
  bool is_shard() const { return vocab != vocab_total; }
  bool in_group() const { return group_size > 0; }
  // A shard on its own, whose statistics a caller joins with those of others.
  bool is_open_shard() const { return is_shard() && !in_group(); }
  // How many targets a row has, whatever kind they are.
  int64_t target_count() const { return targets_per_row > 0 ? targets_per_row : 1; }
  bool has_gradients() const { return want_d_hidden || want_d_classifier || want_d_bias; }
  bool needs_forward() const { return pass != Pass::kBackward; }
  bool needs_backward() const { return pass != Pass::kForward; }
  // Whether numbers of an operand's dtype are rounded before they are multiplied.
  bool rounds(DType dtype) const { return compute_dtype != DType::kF32 && dtype != compute_dtype; }
  // dtype of every N-vector of floating point numbers and of the loss.
  DType stats_dtype() const { return hidden_dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
};

// Which sums a problem needs.
struct WantedSums {
#define LOGITLESS_MEMBER(name, ...) bool name = false;
  LOGITLESS_ROW_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
};
inline WantedSums wanted_sums([[maybe_unused]] const Problem& p) {
  WantedSums sums;
#define LOGITLESS_WANTED(name, part, kind, wanted, ...) sums.name = wanted;
  LOGITLESS_ROW_SUMS(LOGITLESS_WANTED)
#undef LOGITLESS_WANTED
  return sums;
}

// FLOP of one bare GEMM of the problem: the unit F of costs.
inline double gemm_flop(const Problem& p) {
  return 2.0 * static_cast<double>(p.tokens) * static_cast<double>(p.vocab) * static_cast<double>(p.hidden);
}

}  // namespace logitless
