#pragma once
#include <cmath>
#include <limits>

#include "core/host_device.h"

namespace logitless::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The fused kernels compute exp(z - logit_offset) as 2^(z log2(e) + shift), shift = -logit_offset log2(e), in
// one instruction. The rounding of shift is the same for all elements of a row and small where |shift| is
// below this. An logit_offset that is far, beyond it and finite, is subtracted instead: exactly, where z is
// near it.
inline constexpr float kFarShift = 4096;

LOGITLESS_HD inline bool is_far(float logit_offset, float shift) {
  return std::fabs(shift) >= kFarShift && std::fabs(logit_offset) <= std::numeric_limits<float>::max();
}

// An logit_offset in two parts, one of them 0: exp_logits are 2^((z - far) log2(e) + shift).
struct SplitOffset {
  float far, shift;
};

LOGITLESS_HD inline SplitOffset split_offset(float logit_offset) {
  const float shift = -logit_offset * kLog2E;
  return is_far(logit_offset, shift) ? SplitOffset{logit_offset, 0} : SplitOffset{0, shift};
}

// The same of an logit_offset + low, `low` being what rounding to float took off: nothing that matters where
// it is near.
LOGITLESS_HD inline SplitOffset split_offset(float logit_offset, float low) {
  SplitOffset split = split_offset(logit_offset);
  if (split.far != 0) split.shift = -low * kLog2E;
  return split;
}

// What these exp_logits are relative to: the logit_offset but for the rounding of its shift.
LOGITLESS_HD inline double rounded_offset(const SplitOffset& split) {
  return split.far - static_cast<double>(split.shift) / static_cast<double>(kLog2E);
}
LOGITLESS_HD inline double rounded_offset(float logit_offset) {
  return rounded_offset(split_offset(logit_offset));
}

// Kept exp_logits are stored as 2^kKeptExponent times what they are. Relative to the target's logit their sum
// is never below 1, so they would use one half of bf16's exponents alone.
inline constexpr int kKeptExponent = -58;

}  // namespace logitless::cuda
