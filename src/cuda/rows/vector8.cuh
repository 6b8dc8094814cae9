#pragma once
#include <cstdint>

#include "cuda/rows/device_rows.cuh"

namespace headroom::cuda {

// Eight elements of a row, as they lie in memory.
template <class T>
struct alignas(16) Vector8 {
  T x[8];
};

// kAligned: the row begins at a multiple of 16 bytes and its length is one of 8 elements. Else elements at or
// past `left` are 0.
template <bool kAligned, class T>
__device__ __forceinline__ Vector8<T> load8(const T* from, int left) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const Vector8<T>*>(from);
  } else {
    Vector8<T> v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] = i < left ? from[i] : from_float<T>(0);
    return v;
  }
}

inline bool is_aligned8(const void* data, DType dtype, int64_t stride, int64_t columns) {
  const auto bytes = static_cast<uint64_t>(stride) * size_of(dtype);
  return columns % 8 == 0 && ((reinterpret_cast<uintptr_t>(data) | bytes) % 16) == 0;
}

}  // namespace headroom::cuda
