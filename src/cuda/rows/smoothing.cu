#include <algorithm>

#include "cuda/rows/device_rows.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// A block sums a stretch of rows for kThreads columns.
template <class T, bool kRounds>
__global__ void sum_part_kernel(WeightedRows w) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= w.columns) return;
  const int64_t rows = existing(w.row_count, w.rows), end = (blockIdx.y + 1) * rows / kSumParts;
  float sum = 0;
#pragma unroll 4
  for (int64_t row = blockIdx.y * rows / kSumParts; row < end; ++row) {
    const float weight = w.weight != nullptr ? w.weight[row] : 1.0f;
    const T* data = w.data.row<T>(w.row_map != nullptr ? w.row_map[row] : row);
    const float x = kRounds ? as_operand(data[column], w.operand_dtype) : to_float(data[column]);
    if (weight != 0) sum = fmaf(weight, x, sum);
  }
  w.parts[blockIdx.y * w.columns + column] = sum;
}

__global__ void join_parts_kernel(WeightedRows w) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= w.columns) return;
  double sum = 0;
  for (int64_t i = 0; i < kSumParts; ++i) sum += w.parts[i * w.columns + column];
  w.sum[column] = static_cast<float>(sum);
}

// One block; out: sum_j w_j bias_j.
__global__ void __launch_bounds__(1024)
    weighted_bias_kernel(const float* bias, const float* class_weight, int64_t vocab, float* out) {
  double sum = 0;
  for (int64_t j = threadIdx.x; j < vocab; j += 1024) {
    const float w = class_weight != nullptr ? class_weight[j] : 1.0f;
    if (w != 0) sum += double{bias[j]} * w;  // a bias of -inf may mask a class without weight
  }
  sum = block_sum<1024>(sum);
  if (threadIdx.x == 0) *out = static_cast<float>(sum);
}

// One block for each row.
template <class T>
__global__ void __launch_bounds__(kThreads) weighted_logits_kernel(WeightedLogits w) {
  const int64_t row = blockIdx.x;
  if (row >= existing(w.row_count, w.rows) || w.target[row] == kIgnoredRow) return;
  const T* hidden = w.hidden.row<T>(row);
  double dot = 0;
  for (int64_t d = threadIdx.x; d < w.columns; d += kThreads)
    dot += double{to_float(hidden[d])} * w.weight_sum[d];
  double sum = w.transform.scale * block_sum<kThreads>(dot) +
               (w.transform.bias != nullptr ? double{*w.bias_sum} : 0.0);
  sum *= w.transform.inverse_temperature_of(row);
  if (threadIdx.x == 0) w.sums[row] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(1024) smooth_bias_kernel(SmoothBias s) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < s.rows; i += 1024) sum += s.c[i];
  __shared__ double all;
  sum = block_sum<1024>(sum);
  if (threadIdx.x == 0) all = sum;
  __syncthreads();
  for (int64_t j = threadIdx.x; j < s.columns; j += 1024) {
    s.d_bias[j] += static_cast<float>(s.column_weight != nullptr ? all * s.column_weight[j] : all);
  }
}

// Row k of `to` gets the first part of each number, or what is left of it. Products may round float32 to
// TF32, so that a first part has the digits of 16 bits with any T.
template <class T>
__device__ void store_part(const Matrix& to, int64_t row, int64_t column, float number, bool is_rest) {
  using First = std::conditional_t<std::is_same_v<T, float>, __nv_bfloat16, T>;
  const float first = to_float(from_float<First>(number));
  to.row<T>(row)[column] = from_float<T>(is_rest ? number - first : first);
}

template <class T>
__global__ void __launch_bounds__(kThreads) smoothing_rows_kernel(SmoothingRows s) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int k = static_cast<int>(blockIdx.y);
  if (s.exp_logits.data != nullptr && i < s.columns)
    store_part<T>(s.exp_logits, s.row + k, i, s.column_weight != nullptr ? s.column_weight[i] : 1.0f,
                  k / 2 != 0);
  if (s.hidden.data != nullptr && i < s.depth)
    store_part<T>(s.hidden, s.row + k, i, i < s.width ? s.hidden_sum[i] : 0.0f, k % 2 != 0);
}

}  // namespace

void launch_weighted_rows(const WeightedRows& w, const Queue& queue) {
  const dim3 grid(blocks_for(w.columns, kThreads), static_cast<unsigned>(kSumParts));
  for_dtype(w.data.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel =
        w.data.dtype != w.operand_dtype ? sum_part_kernel<T, true> : sum_part_kernel<T, false>;
    queue.launch("weighted_rows", kernel, grid, kThreads, 0, w);
  });
  queue.launch("weighted_rows", join_parts_kernel, blocks_for(w.columns, kThreads), kThreads, 0, w);
}

void launch_weighted_logits(const WeightedLogits& w, const Queue& queue) {
  if (w.transform.bias != nullptr) {
    queue.launch("weighted_logits", weighted_bias_kernel, 1, 1024, 0, w.transform.bias, w.class_weight,
                 w.vocab, w.bias_sum);
  }
  for_dtype(w.hidden.dtype, [&](auto type) {
    queue.launch("weighted_logits", weighted_logits_kernel<decltype(type)>, static_cast<unsigned>(w.rows),
                 kThreads, 0, w);
  });
}

void launch_smooth_bias(const SmoothBias& s, const Queue& queue) {
  queue.launch("smooth_bias", smooth_bias_kernel, 1, 1024, 0, s);
}

void launch_smoothing_rows(const SmoothingRows& s, const Queue& queue) {
  for_dtype(s.exp_logits.dtype, [&](auto type) {
    queue.launch("smoothing_rows", smoothing_rows_kernel<decltype(type)>,
                 dim3(blocks_for(std::max(s.columns, s.depth), kThreads), kSmoothingRows), kThreads, 0, s);
  });
}

}  // namespace logitless::cuda
