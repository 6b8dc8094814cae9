#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "cuda/exp2.cuh"

namespace headroom::cuda::sm90::ptx {

using cuda::exp2_approx;

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The maximum; NaN if either is NaN (fmaxf would drop it). One instruction as fmaxf.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Two numbers rounded to 16 bits each, `low` in the lower half.
template <DType kType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  uint32_t packed;
  if constexpr (kType == DType::kBF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Two packed bf16 times 2^kExponent, exact but for subnormal results.
template <int kExponent>
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t packed) {
  static_assert(kExponent > -127 && kExponent < 128);
  constexpr uint32_t kFactor = static_cast<uint32_t>(kExponent + 127) << 7;
  uint32_t scaled;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(packed), "r"(kFactor << 16 | kFactor));
  return scaled;
}

}  // namespace headroom::cuda::sm90::ptx
