#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/vector8.cuh"

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

constexpr int64_t kStep = int64_t{8} * kThreads;  // elements of a row that a block changes at once

// Each row of the matrix has a row of blocks. The target's element is made from its logit, which keeps the
// digits of p - 1.
template <class T>
__global__ void __launch_bounds__(kThreads) make_dz_kernel(Arena arena, MakeDz m) {
  const int64_t r = blockIdx.x;
  if (r >= existing(m.row_count, m.rows)) return;
  const int32_t target = arena.target[m.first + r];
  const bool is_ignored = target == kIgnoredRow;
  const float a = arena.a[r], c = arena.c[r], scale = m.scale != nullptr ? *m.scale : 1.0f;
  const float inverse_sum = 1 / arena.row_factor[r];
  T* row = m.exp_logits.row<T>(r);
  const auto dz_of = [&](const T& exp_logit, int64_t j) {
    const float p = to_float(exp_logit) * inverse_sum;
    float dz = p == 0 ? 0.0f : p * a;
    if (c != 0) dz += m.class_weight != nullptr ? c * m.class_weight[j] : c;
    return from_float<T>(is_ignored ? 0.0f : dz * scale);
  };
  const int64_t step = gridDim.y * kStep;
  for (int64_t j = 8 * (int64_t{blockIdx.y} * kThreads + threadIdx.x); j < m.columns; j += step) {
    if (j + 8 <= m.columns) {
      auto& piece = *reinterpret_cast<Vector8<T>*>(row + j);
      Vector8<T> elements = piece;
#pragma unroll
      for (int k = 0; k < 8; ++k) elements.x[k] = dz_of(elements.x[k], j + k);
      piece = elements;
    } else {
      for (int64_t k = j; k < m.columns; ++k) row[k] = dz_of(row[k], k);
    }
    if (m.has_one_target && target >= j && target < min(j + 8, m.columns)) {
      const float w = m.class_weight != nullptr ? m.class_weight[target] : 1.0f;
      const RowCoefficients<float> of_row = {a, 0, c, arena.g[r]};
      const float log_p = (arena.target_logit[r] - arena.lse[r]) - arena.lse_residual[r];
      row[target] = from_float<T>(dz_element(of_row, log_p, w, 1.0f) * scale);
    }
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

void launch_smooth_bias(const float* c, int64_t rows, const float* class_weight, int64_t vocab, float* d_bias,
                        const Queue& queue) {
  queue.launch("smooth_bias", smooth_bias_kernel, 1, 1024, 0, c, rows, class_weight, vocab, d_bias);
}

void launch_make_dz(const Arena& arena, const MakeDz& m, const Queue& queue) {
  constexpr int64_t kFewBlocks = 2048;
  const auto parts = static_cast<unsigned>(std::clamp<int64_t>(
      kFewBlocks / std::max<int64_t>(m.rows, 1), 1, std::max<int64_t>(ceil_div(m.columns, kStep), 1)));
  for_dtype(m.exp_logits.dtype, [&](auto type) {
    queue.launch("make_dz", make_dz_kernel<decltype(type)>, dim3(static_cast<unsigned>(m.rows), parts),
                 kThreads, 0, arena, m);
  });
}

}  // namespace logitless::cuda
