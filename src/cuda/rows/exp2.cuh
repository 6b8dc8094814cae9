#pragma once

namespace logitless::cuda {

// 2^x, relative error 2^-22; 2^-inf = 0, subnormal results are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), error 2^-22 for x in (0.5, 2), else a relative error of 2^-22; subnormal numbers count as 0.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace logitless::cuda
