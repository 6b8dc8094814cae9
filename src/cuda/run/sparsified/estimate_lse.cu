#include <cmath>

#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
// The most that a stretch with one sampled column may contribute, as a share of the row: the sampled column
// may be a peak.
constexpr float kMostOfStretch = 1.0f / 16;

__device__ float warp_max(float value) {
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// log(exp(a) + exp(b))
__device__ float log_add(float a, float b) {
  const float high = fmaxf(a, b), low = fminf(a, b);
  return low == -CUDART_INF_F ? high : high + log1pf(expf(low - high));
}

// log of the sum of the partials. Called by a warp.
__device__ float log_of_partials(const PartialStats& partials, int64_t row, int lane) {
  float largest = -CUDART_INF_F;
  for (int64_t s = lane; s < partials.partials; s += 32)
    largest = fmaxf(largest, partials.max[s * partials.stride + row]);
  largest = warp_max(largest);
  if (!(fabsf(largest) < CUDART_INF_F)) return largest;
  float sum = 0;
  for (int64_t s = lane; s < partials.partials; s += 32) {
    sum += partials.sum[s * partials.stride + row] * expf(partials.max[s * partials.stride + row] - largest);
  }
  return largest + logf(warp_sum(sum));
}

// The logit of sample s for a row with this inverse temperature.
__device__ float sample_logit(const LseEstimate& g, float product, int64_t s, float inverse_temperature) {
  const float bias = g.transform.bias != nullptr ? g.transform.bias[g.sample[s]] : 0.0f;
  return g.transform.logit(product, bias, inverse_temperature);
}

// log of the row's sum over all columns. known: the log of the sum over dense columns and the target. The
// unsampled columns of a stretch count like the sampled one, except for peaks. Called by a warp; each lane
// has at most kEach samples.
template <int kEach>
__device__ float estimate(const LseEstimate& g, int64_t row, float known, int lane) {
  float e[kEach], others[kEach];  // e: products, then logits, then exp logits relative to the largest
#pragma unroll
  for (int i = 0; i < kEach; ++i) {  // no load waits for another
    const int64_t s = lane + 32 * i;
    others[i] = s < g.sampled ? g.sample_others[s] : -1;
    e[i] = s < g.sampled ? g.logits[row * g.sampled + s] : 0;
  }
  const float inverse_temperature = g.transform.inverse_temperature_of(row);
  float largest = known;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    e[i] = others[i] >= 0 ? sample_logit(g, e[i], lane + 32 * i, inverse_temperature) : -CUDART_INF_F;
    largest = fmaxf(largest, e[i]);
  }
  largest = warp_max(largest);
  if (!(fabsf(largest) < CUDART_INF_F)) return known;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    e[i] = expf(e[i] - largest);
    sum += e[i];
  }
  const float seen = expf(known - largest) + warp_sum(sum);
  float total = seen;
  for (int round = 0; round < 4; ++round) {
    float unseen = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) unseen += fminf(others[i] * e[i], kMostOfStretch * total);
    total = seen + warp_sum(unseen);
  }
  return largest + logf(total);
}

// One warp for each row.
template <int kEach>
__global__ void estimate_kernel(LseEstimate g, PartialStats partials) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= g.rows) return;
  float known = log_of_partials(partials, row, lane);
  // Each lane clears the partials that it has read. The draw adds its sums to them.
  for (int64_t s = lane; s < partials.partials; s += 32) clear_partial(partials, s * partials.stride + row);
  if (row == 0 && lane == 0 && g.redrawn_count != nullptr) *g.redrawn_count = 0;
  if (lane == 0 && g.dense_lse != nullptr) {
    g.dense_lse[row] = known;
    g.no_threshold[row] = CUDART_INF_F;
  }
  const int32_t y = g.target[row];
  if (y >= 0 && g.role[y] == -1) known = log_add(known, g.target_logit[row]);
  const float lse_estimate = g.sampled > 0 ? estimate<kEach>(g, row, known, lane) : known;
  if (lane != 0) return;
  g.lse_estimate[row] = g.logit_offset[row] = lse_estimate;
  g.lse_estimate_residual[row] = 0;
  g.row_threshold[row] = y == kIgnoredRow ? CUDART_INF_F : g.threshold;
  g.count[row] = 0;
}

// Joins estimates in the order of ranks, but to at most `above` more than the rank's own lse estimate. NaN is
// no bound.
__global__ void merge_estimates_kernel(SparsifiedArena t, int64_t own, int64_t ranks, float above) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= t.rows) return;
  const float* lse_estimates = t.base.gathered;
  float all = -CUDART_INF_F;
  for (int64_t rank = 0; rank < ranks; ++rank) all = log_add(all, lse_estimates[rank * t.rows + row]);
  t.lists.lse_estimate[row] = t.base.logit_offset[row] =
      fminf(all, lse_estimates[own * t.rows + row] + above);
}

__global__ void known_estimate_kernel(SparsifiedArena t) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= t.rows) return;
  t.lists.lse_estimate[row] = t.base.logit_offset[row] = t.base.lse[row];
  t.lists.lse_estimate_residual[row] = t.base.lse_residual[row];
  t.row_threshold[row] = t.base.target[row] == kIgnoredRow ? CUDART_INF_F : t.threshold;
  t.lists.count[row] = 0;
}

}  // namespace

void launch_estimate_lse(const LseEstimate& g, const Queue& queue) {
  constexpr int kMost = static_cast<int>(kSampledColumns) / 32, kHalf = kMost / 2;
  static_assert(kSampledColumns % 64 == 0);
  const auto kernel = g.sampled <= 32 * kHalf ? estimate_kernel<kHalf> : estimate_kernel<kMost>;
  queue.launch("lse_estimate", kernel, blocks_for(g.rows, kThreads / 32), kThreads, 0, g, *g.partials);
}

void launch_merge_estimates(const SparsifiedArena& t, int64_t rank, int64_t ranks, const Queue& queue) {
  constexpr double kTooHigh = 10;  // nats by which the rank's own lse estimate may be too high
  const double above = -std::log(range_of_sums(t.base.partials, kEstimatedRange).least) - kTooHigh;
  queue.launch("merge_estimates", merge_estimates_kernel, blocks_for(t.rows, kThreads), kThreads, 0, t, rank,
               ranks, static_cast<float>(above));
}

void launch_known_estimate(const SparsifiedArena& t, const Queue& queue) {
  queue.launch("known_estimate", known_estimate_kernel, blocks_for(t.rows, kThreads), kThreads, 0, t);
}

}  // namespace logitless::cuda
