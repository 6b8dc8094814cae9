#include <algorithm>

#include "cuda/check.h"
#include "cuda/rows/vector8.cuh"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ void store(T* to, float value, bool accumulate) {
  *to = from_float<T>(accumulate ? to_float(*to) + value : value);
}

// One warp a row of the caller's.
template <class T>
__device__ void zero_if_ignored(const StoreHidden& s, const RowInputs& in, int64_t row) {
  if (row >= in.tokens) return;
  const int64_t target = target_of(in, row);
  if (target != in.ignore_index && in_range(in, target)) return;
  T* to = static_cast<T*>(s.to) + row * s.to_stride;
  for (int64_t i = threadIdx.x % 32; i < s.columns; i += 32) to[i] = from_float<T>(0);
}

// One block a row; those behind them are for the ignored rows. kAligned: rows of both are pieces of 16 bytes.
template <class T, bool kAligned>
__global__ void store_d_hidden_kernel(StoreHidden s, RowInputs in, const Scalars* scalars) {
  const int64_t r = blockIdx.x;
  if (r >= s.rows) return zero_if_ignored<T>(s, in, (r - s.rows) * (kThreads / 32) + threadIdx.x / 32);
  if (r >= existing(s.row_count, s.rows)) return;
  const float factor = scalars->dz_unscale * (s.factor != nullptr ? s.factor[r] : 1.0f);
  const float* from = s.from + r * s.from_stride;
  T* to = static_cast<T*>(s.to) + int64_t{s.row_map[r]} * s.to_stride;
  if constexpr (kAligned) {
    for (int64_t i = 8 * threadIdx.x; i < s.columns; i += 8 * kThreads) {
      const Vector8<float> sums = *reinterpret_cast<const Vector8<float>*>(from + i);
      auto& piece = *reinterpret_cast<Vector8<T>*>(to + i);
      Vector8<T> stored = s.accumulate ? piece : Vector8<T>{};
#pragma unroll
      for (int k = 0; k < 8; ++k) store(&stored.x[k], sums.x[k] * factor, s.accumulate);
      piece = stored;
    }
  } else {
    for (int64_t i = threadIdx.x; i < s.columns; i += kThreads) store(to + i, from[i] * factor, s.accumulate);
  }
}

template <class T>
__global__ void zero_rows_kernel(T* data, int64_t stride, int64_t columns) {
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) data[row * stride + i] = from_float<T>(0);
}

// A block sums 32 columns over all rows, 32 rows at a time; always in the same order.
template <class T>
__global__ void __launch_bounds__(1024) column_sums_kernel(ColumnSums c) {
  __shared__ float parts[32][33];
  const int lane = threadIdx.x % 32, step = threadIdx.x / 32;
  const int64_t j = int64_t{blockIdx.x} * 32 + lane;
  const int64_t end = existing(c.row_count, c.rows);
  float sum = 0;
  if (j < c.columns) {
    for (int64_t r = step; r < end; r += 32) {
      const float dz = to_float(static_cast<const T*>(c.dz)[r * c.stride + j]);
      sum += dz * (c.row_factor != nullptr ? c.row_factor[r] : 1.0f);
    }
  }
  parts[step][lane] = sum;
  __syncthreads();
  if (step != 0 || j >= c.columns) return;
  for (int i = 1; i < 32; ++i) sum += parts[i][lane];
  if (c.factor != nullptr) sum *= *c.factor;
  if (c.adds) sum += c.sums[j];
  if (c.to == nullptr) {
    c.sums[j] = sum;
  } else if (c.to_dtype == DType::kF32) {
    store(static_cast<float*>(c.to) + j, sum * c.to_factor, c.accumulate);
  } else if (c.to_dtype == DType::kBF16) {
    store(static_cast<__nv_bfloat16*>(c.to) + j, sum * c.to_factor, c.accumulate);
  } else {
    store(static_cast<__half*>(c.to) + j, sum * c.to_factor, c.accumulate);
  }
}

template <class T>
__global__ void store_vector_kernel(const float* from, int64_t count, float factor, T* to, bool accumulate) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) store(to + i, from[i] * factor, accumulate);
}

template <class T>
__global__ void scale_unless_one_kernel(T* data, int64_t count, const float* factor) {
  const float by = *factor;
  if (by == 1) return;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    data[i] = from_float<T>(to_float(data[i]) * by);
  }
}

}  // namespace

void launch_scale_unless_one(void* data, DType dtype, int64_t count, const float* factor,
                             const Queue& queue) {
  const unsigned blocks = std::min(blocks_for(count, kThreads), 1024u);
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    queue.launch(scale_unless_one_kernel<T>, blocks, kThreads, 0, static_cast<T*>(data), count, factor);
  });
  check_launch("scale_unless_one");
}

void launch_store_d_hidden(const StoreHidden& s, const RowInputs& in, const Scalars* scalars,
                           const Queue& queue) {
  const auto rows = static_cast<unsigned>(s.rows);
  const bool aligned = is_aligned8(s.from, DType::kF32, s.from_stride, s.columns) &&
                       is_aligned8(s.to, s.dtype, s.to_stride, s.columns);
  const unsigned others = s.zeroes_ignored ? blocks_for(in.tokens, kThreads / 32) : 0;
  for_dtype(s.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = aligned ? store_d_hidden_kernel<T, true> : store_d_hidden_kernel<T, false>;
    queue.launch(kernel, rows + others, kThreads, 0, s, in, scalars);
  });
  check_launch("store_d_hidden");
}

void launch_zero_rows(void* data, DType dtype, int64_t stride, int64_t rows, int64_t columns,
                      const Queue& queue) {
  if (rows == 0) return;
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    queue.launch(zero_rows_kernel<T>, static_cast<unsigned>(rows), kThreads, 0, static_cast<T*>(data), stride,
                 columns);
  });
  check_launch("zero_rows");
}

void launch_column_sums(const ColumnSums& c, const Queue& queue) {
  for_dtype(c.dtype, [&](auto type) {
    queue.launch(column_sums_kernel<decltype(type)>, blocks_for(c.columns, 32), 1024, 0, c);
  });
  check_launch("column_sums");
}

void launch_store_vector(const float* from, int64_t count, float factor, void* to, DType dtype,
                         bool accumulate, const Queue& queue) {
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    queue.launch(store_vector_kernel<T>, blocks_for(count, kThreads), kThreads, 0, from, count, factor,
                 static_cast<T*>(to), accumulate);
  });
  check_launch("store_vector");
}

}  // namespace headroom::cuda
