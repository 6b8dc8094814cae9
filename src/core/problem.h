#pragma once
#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/row_lists.h"

namespace logitless {

enum class Reduction : int { kNone = 0, kSum = 1, kMean = 2 };

// The parts of a training step that a run computes.
enum class Pass : int {
  kForward = 0,   // row statistics, and losses from them (not for a shard of the vocabulary)
  kBackward = 1,  // gradients, from lse (and entropy) of an earlier forward pass and upstream gradients
  kForwardBackward = 2,  // both in one run; the only upstream gradient is that of the reduced loss
};

// How gradients are made. The loss is the same.
enum class GradientMethod : int {
  kExact = 0,
  kSparsified =
      1,  // an unbiased draw, see core/sparsification.h; a plan may be exact where that is no slower
  kAlwaysSparsified = 2,  // the draw in any case
};

// How elements of sparsified gradients are chosen. Numbered as logitless_screen.
enum class Screen : int {
  kNone = 0,  // exact logits
  kFp8 = 1,   // logits of 8-bit operands, see core/sparsification.h and core/fp8.h
};

// Treatment of the ranks' parts of d_hidden in a group. Numbered as logitless_group_d_hidden.
enum class GroupDHidden : int {
  kPart = 0,      // the parts stay
  kSum = 1,       // every rank gets the sum
  kSumOfOwn = 2,  // every rank gets the sum of its own rows
};

inline constexpr int64_t kMostTargetsPerRow = 64;  // as in logitless/options.def

// Everything that a plan depends on: options, whose meanings are in logitless/options.def, and tensors.
// logitless/logitless.h has the formula of the loss. bias_scale is a factor of the bias in it.
struct Problem {
#define LOGITLESS_OPTION_INTEGER(name, NAME, type, default_value, ...) type name = default_value;
#define LOGITLESS_OPTION_REAL(name, NAME, default_value, ...) double name = default_value;
#define LOGITLESS_OPTION_FLAG(name, ...) bool name = false;
#define LOGITLESS_OPTION_CHOICE(name, NAME, type, default_value, ...) type name = type{default_value};
#include "logitless/options.def"
  // validated() divides scale, softcap and bias_scale by a temperature of all rows: t(x) / T is t(x / T) with
  // the softcap divided by T. After it the temperature is 1.
  double bias_scale = 1;

  // The tensors that the plan is made for.
  struct Has {
#define LOGITLESS_TENSOR(name, ...) bool name = false;
#include "logitless/tensors.def"
  } has;
  // Dtypes of the tensors that allow several.
  struct Dtypes {
#define LOGITLESS_FLOAT(name) DType name = DType::kF32;
#define LOGITLESS_INDEX(name) DType name = DType::kI64;
#define LOGITLESS_STATS(name)
#define LOGITLESS_I64(name)
#define LOGITLESS_I32(name)
#define LOGITLESS_U8(name)
#define LOGITLESS_BYTES(name)
#define LOGITLESS_TENSOR(name, NAME, element, dtype, ...) LOGITLESS_##dtype(name)
#include "logitless/tensors.def"
#undef LOGITLESS_FLOAT
#undef LOGITLESS_INDEX
#undef LOGITLESS_STATS
#undef LOGITLESS_I64
#undef LOGITLESS_I32
#undef LOGITLESS_U8
#undef LOGITLESS_BYTES
  } dtype;
  // Whether a gradient is added to its buffer (float32 or float64 only) instead of overwriting it.
  struct Accumulate {
    bool d_hidden = false;
    bool d_weight = false;
    bool d_bias = false;
  } accumulate;

  // Whether the run draws elements or uses drawn ones. A plain forward pass does so only behind a screen.
  bool is_sparsified() const {
    return gradient != GradientMethod::kExact && (pass != Pass::kForward || has.saved || screens());
  }
  bool screens() const { return screen != Screen::kNone; }
  bool is_shard() const { return vocab != vocab_total; }
  bool in_group() const { return group_size > 0; }
  // Whether this is a shard outside a group: a caller joins its statistics with those of others.
  bool is_unmerged_shard() const { return is_shard() && !in_group(); }
  // Number of targets that a row has, of either kind.
  int64_t target_count() const { return targets_per_row > 0 ? targets_per_row : 1; }
  bool smooths() const { return label_smoothing > 0; }
  bool has_gradients() const { return has.d_hidden || has.d_weight || has.d_bias; }
  bool needs_forward() const { return pass != Pass::kBackward; }
  bool needs_backward() const { return pass != Pass::kForward; }
  // Whether all logits are products of rows in e4m3 (core/fp8.h); and whether any are.
  bool has_fp8_logits() const { return compute_dtype == DType::kE4M3; }
  bool rounds_rows() const { return has_fp8_logits() || screens(); }
  // The dtype that operands are rounded to before they are multiplied; kF32: they stay as they are.
  DType product_dtype() const { return has_fp8_logits() ? DType::kBF16 : compute_dtype; }
  bool rounds(DType type) const { return product_dtype() != DType::kF32 && type != product_dtype(); }
  // Dtype of the loss and of every N-vector of floating point numbers.
  DType stats_dtype() const { return dtype.hidden == DType::kF64 ? DType::kF64 : DType::kF32; }
};

// Whether a run of the problem may be given the tensor.
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, shape, planned, allowed, ...) \
  inline bool allows_##name([[maybe_unused]] const Problem& p) {                         \
    return allowed;                                                                      \
  }
#include "logitless/tensors.def"

// The sums that a problem needs.
struct WantedSums {
#define LOGITLESS_MEMBER(name, ...) bool name = false;
  LOGITLESS_ROW_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
};
inline WantedSums wanted_sums(const Problem& p) {
  WantedSums sums;
#define LOGITLESS_WANTED(name, ...) sums.name = allows_##name(p);
  LOGITLESS_ROW_SUMS(LOGITLESS_WANTED)
#undef LOGITLESS_WANTED
  return sums;
}

// FLOP of one matrix product of the problem: the unit F of costs.
inline double gemm_flop(const Problem& p) {
  return 2.0 * static_cast<double>(p.tokens) * static_cast<double>(p.vocab) * static_cast<double>(p.hidden);
}

}  // namespace logitless
