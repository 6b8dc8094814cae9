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
__global__ void to_float_kernel(const T* from, int64_t count, float* to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) to[i] = to_float(from[i]);
}

// One warp a row. The sum has one order, aligned or not.
template <class H, class C, bool kAligned>
__global__ void target_logits_kernel(TargetLogits t) {
  const int64_t r = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (r >= existing(t.row_count, t.rows)) return;
  const int lane = threadIdx.x % 32;
  const int32_t y = t.target[r];
  if (y < 0) {
    if (lane == 0) t.out[r] = 0;
    return;
  }
  const H* h = static_cast<const H*>(t.hidden) + r * t.hidden_stride;
  const C* c = static_cast<const C*>(t.classifier) + int64_t{y} * t.classifier_stride;
  float sum = 0;
#pragma unroll 4
  for (int64_t i = 8 * lane; i < t.depth; i += 8 * 32) {
    const int left = static_cast<int>(min(t.depth - i, int64_t{8}));
    const Vector8<H> of_hidden = load8<kAligned>(h + i, left);
    const Vector8<C> of_classifier = load8<kAligned>(c + i, left);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum = fmaf(to_float(of_hidden.x[k]), to_float(of_classifier.x[k]), sum);
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  float z = t.scale * sum + (t.bias != nullptr ? t.bias[y] : 0.0f);
  if (t.softcap != 0) z = t.softcap * tanhf(z / t.softcap);
  t.out[r] = z;
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

__global__ void zero_tail_kernel(uint4* data, int64_t row_pieces, int64_t rows, const int32_t* row_count) {
  const int64_t begin = existing(row_count, rows) * row_pieces, end = rows * row_pieces;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end; i += step)
    data[i] = uint4{};
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

void launch_to_float(const void* from, DType dtype, int64_t count, float* to, cudaStream_t stream) {
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    to_float_kernel<T>
        <<<blocks_for(count, kThreads), kThreads, 0, stream>>>(static_cast<const T*>(from), count, to);
  });
  check_launch("to_float");
}

void launch_target_logits(const TargetLogits& t, cudaStream_t stream) {
  const unsigned blocks = blocks_for(t.rows, kThreads / 32);
  const bool aligned = is_aligned8(t.hidden, t.hidden_dtype, t.hidden_stride, t.depth) &&
                       is_aligned8(t.classifier, t.classifier_dtype, t.classifier_stride, t.depth);
  for_dtype(t.hidden_dtype, [&](auto h) {
    for_dtype(t.classifier_dtype, [&](auto c) {
      using H = decltype(h);
      using C = decltype(c);
      if (aligned) {
        target_logits_kernel<H, C, true><<<blocks, kThreads, 0, stream>>>(t);
      } else {
        target_logits_kernel<H, C, false><<<blocks, kThreads, 0, stream>>>(t);
      }
    });
  });
  check_launch("target_logits");
}

void launch_scale_rows(const ScaleRows& s, cudaStream_t stream) {
  for_dtype(s.dtype, [&](auto type) {
    scale_rows_kernel<decltype(type)><<<static_cast<unsigned>(s.rows), kThreads, 0, stream>>>(s);
  });
  check_launch("scale_rows");
}

void launch_zero_tail(void* data, DType dtype, int64_t stride, int64_t rows, const int32_t* row_count,
                      cudaStream_t stream) {
  const int64_t pieces = stride * static_cast<int64_t>(size_of(dtype)) / 16;
  zero_tail_kernel<<<264, kThreads, 0, stream>>>(static_cast<uint4*>(data), pieces, rows, row_count);
  check_launch("zero_tail");
}

}  // namespace headroom::cuda
