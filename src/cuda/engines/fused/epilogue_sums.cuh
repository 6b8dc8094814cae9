#pragma once
#include "cuda/engines/fused/epilogue_common.cuh"

// The optional sums of general kernels. Each has its own pass over the tile, made only if wanted: a loop that
// makes all sums at once has too few registers.
namespace logitless::cuda::fused {

// Adds up each of the thread's rows.
__device__ __forceinline__ void sum_rows(const Accumulators& acc, float (&sums)[kQuadRows]) {
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
#pragma unroll
    for (int r = 0; r < kQuadRows; ++r) sums[r] += element(acc, r, i);
  }
}

// The own row's sum of logits. Columns past the window are -inf before and after.
template <class View>
__device__ __forceinline__ float sum_logits(Accumulators& acc, const View& tile, int columns) {
  fill_tail(acc, tile, columns, 0.f);
  float sums[kQuadRows] = {};
  sum_rows(acc, sums);
  // Summed before the tail changes, or two sets of elements would be alive.
  const float own_sum = sum_to_owner(sums);
  fill_tail(acc, tile, columns, -INFINITY);
  return own_sum;
}

// The own row's sum of the squares of its exp logits relative to the logit offset.
__device__ __forceinline__ float sum_squares(const Accumulators& acc, SplitOffset own) {
  // To the compiler this is not the logit offset of other loops, or it would keep the common results of 192
  // elements.
  ptx::forget(own.far, own.shift);
  float sums[kQuadRows] = {};
#pragma unroll
  for (int r = 0; r < kQuadRows; ++r) {
    const float far = from_owner(own.far, r), shift = from_owner(own.shift, r);
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) {
      const float z = element(acc, r, i);
      const float p = ptx::exp2_approx(fmaf(z - far, kLog2E, shift));
      sums[r] = fmaf(p, p, sums[r]);
    }
  }
  return sum_to_owner(sums);
}

// Adds the sum of logits to the own row's partial, if wanted.
template <class View>
__device__ __forceinline__ void add_logits(Accumulators& acc, const View& tile, int columns,
                                           const PartialStats& stats, bool live, int64_t partial) {
  if (stats.logit_sum == nullptr) return;
  const float logits = sum_logits(acc, tile, columns);
  if (live) stats.logit_sum[partial] += logits;
}

}  // namespace logitless::cuda::fused
