#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// A block sums a stretch of rows for kThreads columns.
template <class T>
__global__ void sum_part_kernel(WeightedRows w) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= w.columns) return;
  const int64_t end = (blockIdx.y + 1) * w.rows / kSumParts;
  float sum = 0;
  for (int64_t row = blockIdx.y * w.rows / kSumParts; row < end; ++row) {
    const float weight = w.weight != nullptr ? w.weight[row] : 1.0f;
    if (weight != 0) sum = fmaf(weight, to_operand(w.data.row<T>(row)[column], w.operand_dtype), sum);
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
    sum += double{bias[j]} * (class_weight != nullptr ? class_weight[j] : 1.0f);
  }
  sum = block_sum<1024>(sum);
  if (threadIdx.x == 0) *out = static_cast<float>(sum);
}

// One block for each row. The sum of the bias is in the first of sum_parts, which are no longer needed.
template <class T>
__global__ void __launch_bounds__(kThreads)
    weighted_logits_kernel(SparsifiedArena t, ConstMatrix matrix, int64_t columns,
                           LogitTransform<float> transform) {
  const int64_t row = blockIdx.x;
  if (t.base.target[row] == kIgnoredRow) return;
  const T* hidden = matrix.row<T>(row);
  double dot = 0;
  for (int64_t d = threadIdx.x; d < columns; d += kThreads)
    dot += double{to_float(hidden[d])} * t.weight_sum[d];
  double sum =
      transform.scale * block_sum<kThreads>(dot) + (transform.bias != nullptr ? double{*t.sum_parts} : 0.0);
  sum *= transform.inverse_temperature_of(row);
  if (threadIdx.x == 0) t.base.partials.weighted[row] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(1024)
    smooth_bias_kernel(const float* c, int64_t rows, const float* class_weight, int64_t vocab,
                       float* d_bias) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows; i += 1024) sum += c[i];
  __shared__ double all;
  sum = block_sum<1024>(sum);
  if (threadIdx.x == 0) all = sum;
  __syncthreads();
  for (int64_t j = threadIdx.x; j < vocab; j += 1024) {
    d_bias[j] += static_cast<float>(class_weight != nullptr ? all * class_weight[j] : all);
  }
}

}  // namespace

void launch_weighted_rows(const WeightedRows& w, const Queue& queue) {
  const dim3 grid(blocks_for(w.columns, kThreads), static_cast<unsigned>(kSumParts));
  for_dtype(w.data.dtype, [&](auto type) {
    queue.launch("weighted_rows", sum_part_kernel<decltype(type)>, grid, kThreads, 0, w);
  });
  queue.launch("weighted_rows", join_parts_kernel, blocks_for(w.columns, kThreads), kThreads, 0, w);
}

void launch_weighted_logits(const SparsifiedArena& t, const ConstMatrix& hidden, int64_t columns,
                            const LogitTransform<float>& transform, const float* class_weight,
                            const Queue& queue) {
  if (transform.bias != nullptr) {
    queue.launch("weighted_logits", weighted_bias_kernel, 1, 1024, 0, transform.bias, class_weight, t.vocab,
                 t.sum_parts);
  }
  for_dtype(hidden.dtype, [&](auto type) {
    queue.launch("weighted_logits", weighted_logits_kernel<decltype(type)>, static_cast<unsigned>(t.rows),
                 kThreads, 0, t, hidden, columns, transform);
  });
}

void launch_smooth_bias(const float* c, int64_t rows, const float* class_weight, int64_t vocab, float* d_bias,
                        const Queue& queue) {
  queue.launch("smooth_bias", smooth_bias_kernel, 1, 1024, 0, c, rows, class_weight, vocab, d_bias);
}

}  // namespace logitless::cuda
