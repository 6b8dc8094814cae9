#include <algorithm>

#include "cuda/check.h"
#include "cuda/rows/device_rows.cuh"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ void store(T* to, float value, bool accumulate) {
  *to = from_float<T>(accumulate ? to_float(*to) + value : value);
}

// One block a row.
template <class T>
__global__ void store_d_hidden_kernel(StoreHidden s, const Scalars* scalars) {
  const int64_t r = blockIdx.x;
  if (r >= existing(s.row_count, s.rows)) return;
  const float factor = scalars->dz_unscale * (s.factor != nullptr ? s.factor[r] : 1.0f);
  T* to = static_cast<T*>(s.to) + int64_t{s.row_map[r]} * s.to_stride;
  for (int64_t i = threadIdx.x; i < s.columns; i += kThreads) {
    store(to + i, s.from[r * s.from_stride + i] * factor, s.accumulate);
  }
}

// One warp a row.
template <class T>
__global__ void zero_ignored_rows_kernel(RowInputs in, T* data, int64_t stride, int64_t columns) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (row >= in.tokens) return;
  const int64_t target = target_of(in, row);
  if (target != in.ignore_index && in_range(in, target)) return;
  for (int64_t i = threadIdx.x % 32; i < columns; i += 32) data[row * stride + i] = from_float<T>(0);
}

template <class T>
__global__ void zero_rows_kernel(T* data, int64_t stride, int64_t columns) {
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) data[row * stride + i] = from_float<T>(0);
}

template <class T>
__global__ void store_matrix_kernel(const float* from, int64_t from_stride, int64_t columns, T* to,
                                    int64_t to_stride, bool accumulate, const float* given) {
  const int64_t row = blockIdx.x;
  const float factor = given != nullptr ? *given : 1.0f;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    store(to + row * to_stride + i, from[row * from_stride + i] * factor, accumulate);
  }
}

// A block sums 32 columns over all rows, 32 rows at a time; always in the same order.
template <class T>
__global__ void __launch_bounds__(1024)
    column_sums_kernel(const T* dz, int64_t stride, int64_t rows, int64_t columns, const int32_t* row_count,
                       const float* row_factor, const float* factor, float* sums) {
  __shared__ float parts[32][33];
  const int lane = threadIdx.x % 32, step = threadIdx.x / 32;
  const int64_t j = int64_t{blockIdx.x} * 32 + lane;
  const int64_t end = existing(row_count, rows);
  float sum = 0;
  if (j < columns) {
    for (int64_t r = step; r < end; r += 32) {
      sum += to_float(dz[r * stride + j]) * (row_factor != nullptr ? row_factor[r] : 1.0f);
    }
  }
  parts[step][lane] = sum;
  __syncthreads();
  if (step != 0 || j >= columns) return;
  for (int i = 1; i < 32; ++i) sum += parts[i][lane];
  sums[j] += factor != nullptr ? sum * *factor : sum;
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
                             cudaStream_t stream) {
  const unsigned blocks = std::min(blocks_for(count, kThreads), 1024u);
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    scale_unless_one_kernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<T*>(data), count, factor);
  });
  check_launch("scale_unless_one");
}

void launch_store_d_hidden(const StoreHidden& s, const Scalars* scalars, cudaStream_t stream) {
  for_dtype(s.dtype, [&](auto type) {
    store_d_hidden_kernel<decltype(type)><<<static_cast<unsigned>(s.rows), kThreads, 0, stream>>>(s, scalars);
  });
  check_launch("store_d_hidden");
}

void launch_zero_ignored_rows(const RowInputs& in, void* data, DType dtype, int64_t stride, int64_t columns,
                              cudaStream_t stream) {
  if (in.tokens == 0) return;
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    zero_ignored_rows_kernel<T><<<blocks_for(in.tokens, kThreads / 32), kThreads, 0, stream>>>(
        in, static_cast<T*>(data), stride, columns);
  });
  check_launch("zero_ignored_rows");
}

void launch_zero_rows(void* data, DType dtype, int64_t stride, int64_t rows, int64_t columns,
                      cudaStream_t stream) {
  if (rows == 0) return;
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    zero_rows_kernel<T>
        <<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(static_cast<T*>(data), stride, columns);
  });
  check_launch("zero_rows");
}

void launch_store_matrix(const float* from, int64_t from_stride, int64_t rows, int64_t columns, void* to,
                         DType dtype, int64_t to_stride, bool accumulate, const float* factor,
                         cudaStream_t stream) {
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    store_matrix_kernel<T><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        from, from_stride, columns, static_cast<T*>(to), to_stride, accumulate, factor);
  });
  check_launch("store_matrix");
}

void launch_column_sums(const void* dz, DType dtype, int64_t stride, int64_t rows, int64_t columns,
                        const int32_t* row_count, const float* row_factor, const float* factor, float* sums,
                        cudaStream_t stream) {
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    column_sums_kernel<T><<<blocks_for(columns, 32), 1024, 0, stream>>>(
        static_cast<const T*>(dz), stride, rows, columns, row_count, row_factor, factor, sums);
  });
  check_launch("column_sums");
}

void launch_store_vector(const float* from, int64_t count, float factor, void* to, DType dtype,
                         bool accumulate, cudaStream_t stream) {
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    store_vector_kernel<T><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
        from, count, factor, static_cast<T*>(to), accumulate);
  });
  check_launch("store_vector");
}

}  // namespace headroom::cuda
