#pragma once
#include <cmath>
#include <limits>

#include "core/host_device.h"

namespace logitless::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The fused kernels compute exp(z - anchor) as 2^(z log2(e) + shift), shift = -anchor log2(e), in one
// instruction. The rounding of shift is the same for all elements of a row and small where |shift| is below
// this. An anchor that is far, beyond it and finite, is subtracted instead: exactly, where z is near it.
inline constexpr float kFarShift = 4096;

LOGITLESS_HD inline bool is_far(float anchor, float shift) {
  return std::fabs(shift) >= kFarShift && std::fabs(anchor) <= std::numeric_limits<float>::max();
}

// An anchor in two parts, one of them 0: exps are 2^((z - far) log2(e) + shift).
struct SplitAnchor {
  float far, shift;
};

LOGITLESS_HD inline SplitAnchor split_anchor(float anchor) {
  const float shift = -anchor * kLog2E;
  return is_far(anchor, shift) ? SplitAnchor{anchor, 0} : SplitAnchor{0, shift};
}

// The same of an anchor + low, `low` being what rounding to float took off: nothing that matters where it is
// near.
LOGITLESS_HD inline SplitAnchor split_anchor(float anchor, float low) {
  SplitAnchor split = split_anchor(anchor);
  if (split.far != 0) split.shift = -low * kLog2E;
  return split;
}

// What these exps are relative to: the anchor but for the rounding of its shift.
LOGITLESS_HD inline double effective_anchor(const SplitAnchor& split) {
  return split.far - static_cast<double>(split.shift) / static_cast<double>(kLog2E);
}
LOGITLESS_HD inline double effective_anchor(float anchor) {
  return effective_anchor(split_anchor(anchor));
}

// Kept exps are stored as 2^kKeptExponent times what they are. Relative to the target's logit their sum is
// never below 1, so they would use one half of bf16's exponents alone.
inline constexpr int kKeptExponent = -58;

}  // namespace logitless::cuda
