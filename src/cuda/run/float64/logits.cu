#include "core/top_k.h"
#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/run/float64/kernels.h"
#include "cuda/run/float64/logit.cuh"
#include "cuda/runtime/check.h"

namespace logitless::cuda::float64 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kOfLane = kStrip / 32;  // columns of a strip

__device__ double class_weight(const Inputs& in, int64_t column) {
  return in.class_weight != nullptr ? in.class_weight[in.rows.vocab_start + column] : 1;
}

__device__ double sum_of_lanes(double value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// The weight of a column as a target of the caller's row; target: the only one, where a row has one. Where it
// has several, z of those that are the column goes to `logits`, if given.
__device__ double weight_as_target(const Inputs& in, int64_t row, int64_t column, int64_t target, double z,
                                   double* logits) {
  if (in.rows.targets_per_row == 0) return column == target ? 1 : 0;
  double q = 0;
  for (int64_t k = 0; k < in.rows.targets_per_row; ++k) {
    const int64_t id = target_of(in.rows, row, k);
    if (id == in.rows.ignore_index || id != in.rows.vocab_start + column) continue;
    q += target_weight_of(in.rows, in.target_weight, row, k);
    if (logits != nullptr) logits[row * in.rows.targets_per_row + k] = z;
  }
  return q;
}

// Adds the terms of a logit to a strip whose maximum is known.
__device__ void add_logit(const Inputs& in, RowStats<double>& strip, double z, int64_t column, double q) {
  const double d = z - anchor_of(strip.max);
  const double e = z == -CUDART_INF ? 0 : exp(z - strip.max);  // NaN of +inf
  [[maybe_unused]] const double w = class_weight(in, column);
#define LOGITLESS_SUM(name, part, kind, term) \
  if (in.sums.name) strip.part += term;
  LOGITLESS_ROW_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  if (in.sums.weighted_logit_sum) strip.weight += w;
}

// Of kStrip columns from `first` of the block's row r, known to all lanes of the warp.
__device__ RowStats<double> strip_stats(const Inputs& in, const Arena& arena, const Block& block, int64_t r,
                                        int64_t first, int32_t target) {
  double z[kOfLane];
  RowStats<double> strip;
  strip.argmax = INT64_MAX;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int64_t j = first + threadIdx.x % 32 + 32 * i, column = block.column + j;
    z[i] = -CUDART_INF;
    if (j >= block.columns) continue;
    z[i] = logit(in, block.data[r * block.stride + j], block.row + r, column).z;
    if (is_better(z[i], in.rows.vocab_start + column, strip.max, strip.argmax)) {
      strip.max = z[i];
      strip.argmax = in.rows.vocab_start + column;
    }
  }
  for (int step = 16; step > 0; step /= 2) {
    const double max = __shfl_xor_sync(~0u, strip.max, step);
    const int64_t argmax = __shfl_xor_sync(~0u, strip.argmax, step);
    if (is_better(max, argmax, strip.max, strip.argmax)) strip.max = max, strip.argmax = argmax;
  }
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int64_t j = first + threadIdx.x % 32 + 32 * i;
    if (j >= block.columns) continue;
    const int64_t column = block.column + j;
    add_logit(in, strip, z[i], column,
              weight_as_target(in, block.row + r, column, target, z[i], arena.target_logits));
  }
#define LOGITLESS_SUM(name, part, ...) strip.part = sum_of_lanes(strip.part);
  LOGITLESS_ROW_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  strip.weight = sum_of_lanes(strip.weight);
  return strip;
}

// One warp a row.
__global__ void __launch_bounds__(kThreads) stats_kernel(Inputs in, Arena arena, Block block) {
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r >= block.rows) return;
  const int64_t row = block.row + r;
  const int32_t target = arena.target[row];
  if (target == kIgnoredRow) return;
  RowStats<double> all;
  if (block.column > 0) all = arena.stats[row];
  for (int64_t j = 0; j < block.columns; j += kStrip)
    all = merge(all, strip_stats(in, arena, block, r, j, target));
  if (threadIdx.x % 32 == 0) arena.stats[row] = all;
}

__global__ void __launch_bounds__(kThreads) dz_kernel(Inputs in, Arena arena, Block block) {
  const int64_t r = blockIdx.y, j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= block.columns) return;
  const int64_t row = block.row + r, column = block.column + j;
  double* at = block.data + r * block.stride + j;
  const int32_t target = arena.target[row];
  if (target == kIgnoredRow) {
    *at = 0;
    return;
  }
  const RowGradient& gradient = arena.gradients[row];
  const auto [z, slope] = logit(in, *at, row, column);
  const double q = weight_as_target(in, row, column, target, z, nullptr);
  *at = dz_element(gradient.k, gradient.lse.log_p(z), class_weight(in, column), q) * slope;
}

}  // namespace

void launch_stats(const Inputs& in, const Arena& arena, const Block& block, cudaStream_t stream) {
  Queue(stream).launch(stats_kernel, blocks_for(block.rows, kWarps), kThreads, 0, in, arena, block);
  check_launch("float64 stats");
}

void launch_dz(const Inputs& in, const Arena& arena, const Block& block, cudaStream_t stream) {
  const dim3 blocks(blocks_for(block.columns, kThreads), static_cast<unsigned>(block.rows));
  Queue(stream).launch(dz_kernel, blocks, kThreads, 0, in, arena, block);
  check_launch("float64 dz");
}

}  // namespace logitless::cuda::float64
