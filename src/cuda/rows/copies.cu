#include "cuda/check.h"
#include "cuda/rows/vector8.cuh"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;

__device__ bool row_exists(const RowsCopy& c, int64_t r) {
  return r < existing(c.row_count, c.rows) && (c.target == nullptr || c.target[r] != kIgnoredRow);
}

// One block a row.
template <class From, class To>
__global__ void copy_rows_kernel(RowsCopy c) {
  const int64_t r = blockIdx.x;
  To* to = static_cast<To*>(c.to) + r * c.to_stride;
  const bool exists = row_exists(c, r);
  const int64_t row = exists && c.row_map != nullptr ? c.row_map[r] : r;
  const From* from = static_cast<const From*>(c.from) + row * c.from_stride;
  for (int64_t i = threadIdx.x; i < c.padded; i += blockDim.x) {
    to[i] = exists && i < c.columns ? from_float<To>(to_float(from[i])) : from_float<To>(0);
  }
}

// The same for equal dtypes and rows of whole 16-byte pieces.
__global__ void copy_aligned_rows_kernel(RowsCopy c, int element) {
  const int64_t r = blockIdx.x;
  const int64_t lanes = 16 / element;
  auto* to = reinterpret_cast<uint4*>(static_cast<char*>(c.to) + r * c.to_stride * element);
  const bool exists = row_exists(c, r);
  const int64_t row = exists && c.row_map != nullptr ? c.row_map[r] : r;
  const auto* from =
      reinterpret_cast<const uint4*>(static_cast<const char*>(c.from) + row * c.from_stride * element);
  for (int64_t i = threadIdx.x; i < c.padded / lanes; i += blockDim.x) to[i] = exists ? from[i] : uint4{};
}

bool is_aligned(const void* pointer, int64_t stride, DType dtype) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uint64_t>(stride) * size_of(dtype)) % 16 == 0;
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

void launch_copy_rows(const RowsCopy& c, cudaStream_t stream) {
  if (c.rows == 0) return;
  const auto blocks = static_cast<unsigned>(c.rows);
  const bool whole = c.from_dtype == c.to_dtype && c.columns == c.padded &&
                     is_aligned(c.from, c.from_stride, c.from_dtype) &&
                     is_aligned(c.to, c.to_stride, c.to_dtype) && is_aligned(nullptr, c.columns, c.to_dtype);
  if (whole) {
    copy_aligned_rows_kernel<<<blocks, kThreads, 0, stream>>>(c, static_cast<int>(size_of(c.to_dtype)));
  } else {
    for_dtype(c.from_dtype, [&](auto from) {
      for_dtype(c.to_dtype, [&](auto to) {
        copy_rows_kernel<decltype(from), decltype(to)><<<blocks, kThreads, 0, stream>>>(c);
      });
    });
  }
  check_launch("copy_rows");
}

void launch_scale_rows(const ScaleRows& s, cudaStream_t stream) {
  for_dtype(s.dtype, [&](auto type) {
    scale_rows_kernel<decltype(type)><<<static_cast<unsigned>(s.rows), kThreads, 0, stream>>>(s);
  });
  check_launch("scale_rows");
}

}  // namespace headroom::cuda
