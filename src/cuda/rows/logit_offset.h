#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/fp8.h"
#include "core/host_device.h"

namespace logitless::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The fused kernels compute exp(z - logit_offset) as 2^(z log2(e) + shift), shift = -logit_offset log2(e), in
// one instruction. The rounding of shift is the same for all elements of a row, and small if |shift| is below
// this limit. A far logit offset, finite and beyond the limit, is subtracted instead, which is exact if z is
// near it.
inline constexpr float kFarShift = 4096;

LOGITLESS_HD inline bool is_far(float logit_offset, float shift) {
  return std::fabs(shift) >= kFarShift && std::fabs(logit_offset) <= std::numeric_limits<float>::max();
}

// A logit offset in two parts, one of which is 0: exp logits are 2^((z - far) log2(e) + shift).
struct SplitOffset {
  float far, shift;
};

LOGITLESS_HD inline SplitOffset split_offset(float logit_offset) {
  const float shift = -logit_offset * kLog2E;
  return is_far(logit_offset, shift) ? SplitOffset{logit_offset, 0} : SplitOffset{0, shift};
}

// Splits logit_offset + low, where `low` is the offset's rounding error. It matters only for far offsets.
LOGITLESS_HD inline SplitOffset split_offset(float logit_offset, float low) {
  SplitOffset split = split_offset(logit_offset);
  if (split.far != 0) split.shift = -low * kLog2E;
  return split;
}

// The value that these exp logits are relative to: the logit offset with its shift rounded.
LOGITLESS_HD inline double rounded_offset(const SplitOffset& split) {
  return split.far - static_cast<double>(split.shift) / static_cast<double>(kLog2E);
}
LOGITLESS_HD inline double rounded_offset(float logit_offset) {
  return rounded_offset(split_offset(logit_offset));
}

// Kept exp logits are stored times 2^kKeptExponent. Relative to the target's logit their sum is never below
// 1, so unscaled they would use only half of bf16's exponents.
inline constexpr int kKeptExponent = -58;

// The exponent of a group of exp logits in float16, from the largest of them (Exponents in engines/logits.h).
LOGITLESS_HD inline int shared_exponent(float largest) {
  const int biased = static_cast<int>(std::bit_cast<uint32_t>(largest) >> 23 & 255);  // of NaN 255
  return std::min(127 + 14 - biased, 126);
}

}  // namespace logitless::cuda
