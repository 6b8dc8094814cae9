#pragma once
// Stands in for the library's header of this name.
#include "core/dtype.h"
#include "cuda/rows/exp2.cuh"
#include "language.h"

namespace logitless::cuda::fused::ptx {

using cuda::exp2_approx;

inline float reciprocal_approx(float x) {
  return 1 / x;
}

inline float max_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b);
}

inline uint32_t mask_equal(float a, float b) {
  return a == b ? ~0u : 0;
}
inline uint32_t mask_nan(float a) {
  return std::isnan(a) ? ~0u : 0;
}
inline uint32_t mask_not_below(float a, float b) {
  return a < b ? 0 : ~0u;
}

template <DType kType>
uint32_t pack_one(float value) {
  if constexpr (kType == DType::kBF16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  } else {
    return __half_as_ushort(__float2half_rn(value));
  }
}

// Rounds before the factor, as the library's function does.
template <DType kType, int kExponent>
uint32_t pack_scaled(float low, float high) {
  const auto one = [](float value) {
    const uint32_t packed = pack_one<kType>(value);
    if constexpr (kExponent == 0) return packed;
    return pack_one<kType>(std::bit_cast<float>(packed << 16) * std::ldexp(1.0f, kExponent));
  };
  return one(high) << 16 | one(low);
}

}  // namespace logitless::cuda::fused::ptx
