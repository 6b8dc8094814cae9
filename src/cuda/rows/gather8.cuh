#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/rows/gathers.h"
#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {

// Adds factor times v. fp32 is rounded to the dtype of the operands.
template <class T, class Real>
__device__ __forceinline__ void add8(Real (&sum)[8], const Vector8<T>& v, Real factor, DType operand) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = std::fma(to_operand(v.x[i], operand), factor, sum[i]);
}

// column: the first of the eight.
__device__ __forceinline__ void smooth8(float (&sum)[8], const Smoothing& smoothing, int64_t row,
                                        int64_t column, int left) {
  const float factor = smoothing.row_factor != nullptr ? smoothing.row_factor[row] : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < left) sum[i] = fmaf(factor, smoothing.sum[column + i], sum[i]);
  }
}

template <bool kAligned, class T>
__device__ __forceinline__ void store8(T* to, const RealOf<T> (&sum)[8], int left, bool accumulate) {
  Vector8<T> v;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const RealOf<T> old = accumulate && i < left ? to_real(to[i]) : RealOf<T>(0);
    v.x[i] = from_real<T>(old + sum[i]);
  }
  if constexpr (kAligned) {
    *reinterpret_cast<Vector8<T>*>(to) = v;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < left) to[i] = v.x[i];
    }
  }
}

// Calls body(aligned, smooth) with both as types, for which kernels are instantiated. In double nothing is
// smooth.
template <class Real, class F>
void for_gather(bool aligned, bool smooth, F&& body) {
  if constexpr (std::is_same_v<Real, double>) {
    aligned ? body(std::true_type{}, std::false_type{}) : body(std::false_type{}, std::false_type{});
  } else if (aligned) {
    smooth ? body(std::true_type{}, std::true_type{}) : body(std::true_type{}, std::false_type{});
  } else {
    smooth ? body(std::false_type{}, std::true_type{}) : body(std::false_type{}, std::false_type{});
  }
}

}  // namespace logitless::cuda
