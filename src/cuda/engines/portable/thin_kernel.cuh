#pragma once
// The first draw of thinned gradients (core/thinning.h) from a block of dot products; one block of threads a
// row.
#include "core/thinning.h"
#include "cuda/engines/portable/row_kernels.cuh"

namespace logitless::cuda::portable {

// A thread draws over its elements of the tile, every kRowThreads-th.
__global__ void __launch_bounds__(kRowThreads) thin_kernel(RowParams<ThinArgs> params, Tile<float> tile) {
  const LogitsProduct& product = params.product;
  const ThinArgs& args = params.args;
  const int64_t row = tile.row + blockIdx.x;
  if (!row_exists(product, row)) return;
  if (product.target != nullptr && product.target[row] == kIgnoredRow) return;
  const float* dots = tile.z + blockIdx.x * tile.stride;
  const float inverse_temperature = product.transform.inverse_temperature_of(row);
  const Draws& draws = args.draws;
  const int64_t index = draws.row != nullptr ? draws.row[row] : row;
  const float anchor = args.anchor[row], threshold = draws.threshold[row];
  const float low = draws.guess_low != nullptr ? draws.guess_low[index] : 0.0f;
  const int64_t first_column = product.column_offset + tile.column;
  const int64_t target = product.target == nullptr ? -1 : product.target[row] - first_column;
  const uint32_t stream =
      kFirstDrawStream + draws.first_stream + static_cast<uint32_t>(first_column + threadIdx.x);
  float running =
      threshold * (1 - draw_uniform(draw_bits(*draws.seed, static_cast<uint32_t>(index), stream)));
  float largest = -CUDART_INF_F;
  int32_t at = INT32_MAX;
  double sum = 0, expected = 0;
  Parts parts;
  for (int64_t j = threadIdx.x; j < tile.columns; j += kRowThreads) {
    const float z = transformed(product, dots[j], tile.column + j, inverse_temperature);
    if (j == target) args.target_logit[row] = z;
    const float q = expf((z - anchor) - low);
    if (is_better(z, static_cast<int32_t>(j), largest, at)) largest = z, at = static_cast<int32_t>(j);
    sum += q;
    parts.add(args, tile.column + j, z, anchor, q);
    const bool large = q >= draws.certain_share * threshold;
    expected += large ? threshold : q;
    if (!large) running += q;
    const bool passed = running >= threshold;
    if (passed) running -= threshold;
    const auto column = static_cast<int32_t>(first_column + j);
    if (!(large || passed) || draws.role[column] >= 0) continue;
    const int32_t place = atomicAdd(draws.count + index, 1);
    if (place < draws.capacity - 1) draws.elements[index * draws.capacity + place] = {2 * column + large, z};
  }
  const StatSlots& slots = args.stats;
  if (slots.sum == nullptr) return;
  if (slots.max != nullptr) block_max(largest, at);
  sum = block_sum<kRowThreads>(sum);
  parts.join();
  expected = block_sum<kRowThreads>(expected);
  if (threadIdx.x != 0) return;
  slots.sum[row] += static_cast<float>(sum);
  slots.expected[row] += static_cast<float>(expected);
#define LOGITLESS_ADD(name, part, ...) \
  if (slots.part != nullptr) slots.part[row] += static_cast<float>(parts.part);
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_ADD)
#undef LOGITLESS_ADD
  if (slots.max == nullptr) return;
  at += static_cast<int32_t>(first_column);
  if (slots.argmax != nullptr &&
      is_better(largest, at, slots.max[row], slots.argmax[row] < 0 ? INT32_MAX : slots.argmax[row])) {
    slots.argmax[row] = at;
  }
  if (largest > slots.max[row] || isnan(largest)) slots.max[row] = largest;
}

}  // namespace logitless::cuda::portable
