#include "cuda/rows/device_rows.cuh"
#include "cuda/run/thinned/thinned.h"
#include "cuda/runtime/check.h"

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
    if (weight != 0)
      sum = fmaf(weight, to_operand(static_cast<const T*>(w.data)[row * w.stride + column], w.operand_dtype),
                 sum);
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
__global__ void __launch_bounds__(1024) weighted_bias_kernel(WeightedLogits w) {
  double sum = 0;
  for (int64_t j = threadIdx.x; j < w.vocab; j += 1024) {
    sum += double{w.transform.bias[j]} * (w.class_weight != nullptr ? w.class_weight[j] : 1.0f);
  }
  sum = block_sum<1024>(sum);
  if (threadIdx.x == 0) *w.bias_sum = static_cast<float>(sum);
}

// One block a row.
template <class T>
__global__ void __launch_bounds__(kThreads) weighted_logits_kernel(WeightedLogits w) {
  const int64_t row = blockIdx.x;
  if (w.target[row] == kIgnoredRow) return;
  const T* hidden = static_cast<const T*>(w.hidden) + row * w.hidden_stride;
  double dot = 0;
  for (int64_t d = threadIdx.x; d < w.columns; d += kThreads)
    dot += double{to_float(hidden[d])} * w.classifier_sum[d];
  double sum = w.transform.scale * block_sum<kThreads>(dot) +
               (w.transform.bias != nullptr ? double{*w.bias_sum} : 0.0);
  sum *= w.transform.inverse_temperature_of(row);
  if (threadIdx.x == 0) w.weighted[row] = static_cast<float>(sum);
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
  for_dtype(w.dtype, [&](auto type) { queue.launch(sum_part_kernel<decltype(type)>, grid, kThreads, 0, w); });
  queue.launch(join_parts_kernel, blocks_for(w.columns, kThreads), kThreads, 0, w);
  check_launch("weighted_rows");
}

void launch_weighted_logits(const WeightedLogits& w, const Queue& queue) {
  if (w.transform.bias != nullptr) queue.launch(weighted_bias_kernel, 1, 1024, 0, w);
  for_dtype(w.hidden_dtype, [&](auto type) {
    queue.launch(weighted_logits_kernel<decltype(type)>, static_cast<unsigned>(w.rows), kThreads, 0, w);
  });
  check_launch("weighted_logits");
}

void launch_smooth_bias(const float* c, int64_t rows, const float* class_weight, int64_t vocab, float* d_bias,
                        const Queue& queue) {
  queue.launch(smooth_bias_kernel, 1, 1024, 0, c, rows, class_weight, vocab, d_bias);
  check_launch("smooth_bias");
}

}  // namespace logitless::cuda
