#pragma once
#include <cstdint>

#include "cuda/rows/device_rows.cuh"

namespace logitless::cuda {

// Eight elements of a row, as they lie in memory.
template <class T>
struct alignas(16) Vector8 {
  T x[8];
};

// Loads eight elements. kAligned: the row begins at a multiple of 16 bytes and its length is a multiple of 8
// elements. Otherwise elements from `left` on are 0.
template <bool kAligned, class T>
__device__ __forceinline__ Vector8<T> load8(const T* from, int left) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const Vector8<T>*>(from);
  } else {
    Vector8<T> v;
#pragma unroll
    for (int i = 0; i < 8; ++i) v.x[i] = i < left ? from[i] : from_real<T>(0);
    return v;
  }
}

template <class To, class From>
__device__ __forceinline__ Vector8<To> converted(const Vector8<From>& from) {
  if constexpr (std::is_same_v<From, To>) {
    return from;
  } else {
    Vector8<To> to;
#pragma unroll
    for (int k = 0; k < 8; ++k) to.x[k] = from_real<To>(to_real(from.x[k]));
    return to;
  }
}

// Loads from an aligned row that is not read again soon: other data stay in L2.
template <class T>
__device__ __forceinline__ Vector8<T> load8_once(const T* from) {
  Vector8<T> v;
#pragma unroll
  for (size_t i = 0; i < sizeof v / 16; ++i) {
    reinterpret_cast<uint4*>(&v)[i] = __ldcs(reinterpret_cast<const uint4*>(from) + i);
  }
  return v;
}

// Readable memory: [begin, end).
struct Extent {
  const void *begin, *end;
};

// The extent of rows; the last one ends with its columns.
template <class T>
__device__ __forceinline__ Extent extent_of(const ConstMatrix& m, int64_t rows, int64_t columns) {
  return {m.row<T>(0), m.row<T>(rows - 1) + columns};
}
// The extent of one row.
template <class T>
__device__ __forceinline__ Extent extent_of(const T* row, int64_t columns) {
  return {row, row + columns};
}

// Loads eight elements at any address in two steps, so that no load waits for another. The first step loads
// the pieces of 16 bytes that contain them, the second extracts the elements. The pieces may contain other
// elements. If one of those is not readable, the second step loads element by element.
template <class T>
struct Pieces8 {
  const T* from;
  uint4 piece[sizeof(Vector8<T>) / 16 + 1];
  bool complete;
};

template <class T>
__device__ __forceinline__ Pieces8<T> load_pieces8(const T* from, int left, const Extent& readable) {
  constexpr int kPieces = sizeof(Vector8<T>) / 16;
  const uintptr_t address = reinterpret_cast<uintptr_t>(from), begin = address / 16 * 16;
  const uintptr_t end = begin + 16 * (kPieces + (begin != address));
  Pieces8<T> loaded;
  loaded.from = from;
  loaded.complete = left > 0 && begin >= reinterpret_cast<uintptr_t>(readable.begin) &&
                    end <= reinterpret_cast<uintptr_t>(readable.end);
  const uint4* pieces = reinterpret_cast<const uint4*>(begin);
#pragma unroll
  for (int i = 0; i <= kPieces; ++i) {
    const bool needed = loaded.complete && (i < kPieces || begin != address);
    loaded.piece[i] = needed ? pieces[i] : uint4{};
  }
  return loaded;
}

// Elements from `left` on are 0.
template <class T>
__device__ __forceinline__ Vector8<T> elements8(const Pieces8<T>& loaded, int left) {
  if (!loaded.complete) return load8<false>(loaded.from, left);
  constexpr int kWords = sizeof(Vector8<T>) / 4;
  const unsigned offset = reinterpret_cast<uintptr_t>(loaded.from) % 16;
  uint32_t words[kWords + 4];
#pragma unroll
  for (int i = 0; i < kWords / 4 + 1; ++i) {
    words[4 * i] = loaded.piece[i].x;
    words[4 * i + 1] = loaded.piece[i].y;
    words[4 * i + 2] = loaded.piece[i].z;
    words[4 * i + 3] = loaded.piece[i].w;
  }
#pragma unroll
  for (int i = 0; i < kWords + 2; ++i) words[i] = (offset & 8) != 0 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < kWords + 1; ++i) words[i] = (offset & 4) != 0 ? words[i + 1] : words[i];
  union {
    uint32_t bits[kWords];
    Vector8<T> v;
  } out;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    out.bits[i] = sizeof(T) == 2 ? __funnelshift_r(words[i], words[i + 1], 8 * (offset & 2)) : words[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) out.v.x[i] = i < left ? out.v.x[i] : from_real<T>(0);
  return out.v;
}

// The two steps for rows that may be aligned, as for load8(), or not.
template <bool kAligned, class T>
using Loading8 = std::conditional_t<kAligned, Vector8<T>, Pieces8<T>>;

template <bool kAligned, class T>
__device__ __forceinline__ Loading8<kAligned, T> start_load8(const T* from, int left,
                                                             const Extent& readable) {
  if constexpr (kAligned) {
    return left > 0 ? load8<true>(from, left) : Vector8<T>{};
  } else {
    return load_pieces8(from, left, readable);
  }
}

template <class T>
__device__ __forceinline__ const Vector8<T>& end_load8(const Vector8<T>& loaded, int) {
  return loaded;
}
template <class T>
__device__ __forceinline__ Vector8<T> end_load8(const Pieces8<T>& loaded, int left) {
  return elements8(loaded, left);
}

inline bool is_aligned8(const ConstMatrix& m, int64_t columns) {
  const auto bytes = static_cast<uint64_t>(m.stride) * size_of(m.dtype);
  return columns % 8 == 0 && ((reinterpret_cast<uintptr_t>(m.data) | bytes) % 16) == 0;
}

}  // namespace logitless::cuda
