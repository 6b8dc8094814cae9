#include "cuda/check.h"
#include "cuda/rows/vector8.cuh"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;

__device__ bool row_exists(const RowsCopy& c, int64_t r) {
  return r < existing(c.row_count, c.rows) && (c.target == nullptr || c.target[r] != kIgnoredRow);
}

// Asked by all threads of a block.
__device__ bool holds(const Condition& condition) {
  if (condition.bytes == nullptr) return true;
  const auto* bytes = static_cast<const uint8_t*>(condition.bytes);
  bool found = false;
  for (int64_t i = threadIdx.x; i < condition.count; i += blockDim.x) found |= bytes[i] != 0;
  return __syncthreads_or(found) != 0;
}

// One block a row.
template <class From, class To>
__global__ void copy_rows_kernel(RowsCopy c) {
  if (!holds(c.condition)) return;
  const int64_t r = blockIdx.x;
  To* to = static_cast<To*>(c.to) + r * c.to_stride;
  const bool exists = row_exists(c, r);
  const int64_t row = exists && c.row_map != nullptr ? c.row_map[r] : r;
  const From* from = static_cast<const From*>(c.from) + row * c.from_stride;
  for (int64_t i = threadIdx.x; i < c.padded; i += blockDim.x) {
    to[i] = exists && i < c.columns ? from_float<To>(to_float(from[i])) : from_float<To>(0);
  }
}

// The same for rows of whole eights that begin at multiples of 16 bytes.
template <class From, class To>
__global__ void copy_aligned_rows_kernel(RowsCopy c) {
  if (!holds(c.condition)) return;
  const int64_t r = blockIdx.x;
  To* to = static_cast<To*>(c.to) + r * c.to_stride;
  const bool exists = row_exists(c, r);
  const int64_t row = exists && c.row_map != nullptr ? c.row_map[r] : r;
  const From* from = static_cast<const From*>(c.from) + row * c.from_stride;
  for (int64_t i = int64_t{8} * threadIdx.x; i < c.columns; i += int64_t{8} * blockDim.x) {
    Vector8<To> out{};
    if (exists) {
      const Vector8<From> in = load8<true>(from + i, 8);
#pragma unroll
      for (int k = 0; k < 8; ++k) out.x[k] = from_float<To>(to_float(in.x[k]));
    }
    *reinterpret_cast<Vector8<To>*>(to + i) = out;
  }
}

template <class T>
__global__ void scale_rows_kernel(ScaleRows s) {
  const int64_t r = blockIdx.x;
  const bool exists = r < existing(s.row_count, s.rows);
  const float factor = exists ? s.factor[r] * (s.common != nullptr ? *s.common : 1.0f) : 0;
  T* row = static_cast<T*>(s.data) + r * s.stride;
  for (int64_t i = threadIdx.x; i < s.columns; i += blockDim.x) {
    row[i] = exists ? from_float<T>(to_float(row[i]) * factor) : from_float<T>(0);
  }
}

}  // namespace

void launch_copy_rows(const RowsCopy& c, const Queue& queue) {
  if (c.rows == 0) return;
  const auto blocks = static_cast<unsigned>(c.rows);
  const bool aligned = c.columns == c.padded && is_aligned8(c.from, c.from_dtype, c.from_stride, c.columns) &&
                       is_aligned8(c.to, c.to_dtype, c.to_stride, c.columns);
  for_dtype(c.from_dtype, [&](auto from) {
    for_dtype(c.to_dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      if (aligned) {
        queue.launch(copy_aligned_rows_kernel<From, To>, blocks, kThreads, 0, c);
      } else {
        queue.launch(copy_rows_kernel<From, To>, blocks, kThreads, 0, c);
      }
    });
  });
  check_launch("copy_rows");
}

void launch_scale_rows(const ScaleRows& s, const Queue& queue) {
  for_dtype(s.dtype, [&](auto type) {
    queue.launch(scale_rows_kernel<decltype(type)>, static_cast<unsigned>(s.rows), kThreads, 0, s);
  });
  check_launch("scale_rows");
}

}  // namespace headroom::cuda
