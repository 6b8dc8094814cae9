#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "cuda/rows/exp2.cuh"

namespace logitless::cuda::fused::ptx {

using cuda::exp2_approx;

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The maximum; NaN if either is NaN (fmaxf would drop it). One instruction, like fmaxf.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// All bits if a and b are equal, else none. These are masks because that many predicates would spill.
__device__ __forceinline__ uint32_t mask_equal(float a, float b) {
  uint32_t equal;
  asm("set.eq.u32.f32 %0, %1, %2;" : "=r"(equal) : "f"(a), "f"(b));
  return equal;
}

// All bits if a is NaN, else none.
__device__ __forceinline__ uint32_t mask_nan(float a) {
  uint32_t nan;
  asm("set.nan.u32.f32 %0, %1, %2;" : "=r"(nan) : "f"(a), "f"(a));
  return nan;
}

// All bits if a is NaN or not below b, else none.
__device__ __forceinline__ uint32_t mask_not_below(float a, float b) {
  uint32_t not_below;
  asm("set.geu.u32.f32 %0, %1, %2;" : "=r"(not_below) : "f"(a), "f"(b));
  return not_below;
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

// Two packed bf16 times 2^kExponent, exact except for subnormal results.
template <int kExponent>
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t packed) {
  static_assert(kExponent > -127 && kExponent < 128);
  constexpr uint32_t kFactor = static_cast<uint32_t>(kExponent + 127) << 7;
  uint32_t scaled;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr uint32_t kNegativeZeros = 0x80008000u;  // they change no product
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(scaled)
      : "r"(packed), "r"(kFactor << 16 | kFactor), "r"(kNegativeZeros));
#else
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(packed), "r"(kFactor << 16 | kFactor));
#endif
  return scaled;
}

// Two numbers rounded to 16 bits, then times 2^kExponent.
template <DType kType, int kExponent>
__device__ __forceinline__ uint32_t pack_scaled(float low, float high) {
  static_assert(kExponent == 0 || kType == DType::kBF16);
  const uint32_t packed = pack<kType>(low, high);
  if constexpr (kExponent == 0) {
    return packed;
  } else {
    return scale_bf16x2<kExponent>(packed);
  }
}

}  // namespace logitless::cuda::fused::ptx
