#include "cuda/check.h"
#include "cuda/thinned/thinned.h"
#include "cuda/thinned/vector8.cuh"

namespace headroom::cuda {
namespace {

constexpr int kMostThreads = 512;
constexpr int kInFlight = 8;  // classifier rows that a thread waits for at once

// A block a row (and stretch of its columns); a thread has eight columns.
template <class C, class To, bool kAligned>
__global__ void __launch_bounds__(kMostThreads) gather_hidden_kernel(GatherHidden g) {
  const int64_t row = blockIdx.x;
  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * 8;
  if (column >= g.columns) return;
  const int left = static_cast<int>(min(g.columns - column, int64_t{8}));
  const Kept* kept = g.kept + row * g.capacity;
  const int count = g.kept_count[row];
  const C* classifier = static_cast<const C*>(g.classifier) + column;
  float sum[8] = {};
  int i = 0;
  for (; i + kInFlight <= count; i += kInFlight) {
    Vector8<C> rows[kInFlight];
    float values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const Kept element = kept[i + k];
      values[k] = element.value;
      rows[k] = load8<kAligned>(classifier + element.column * g.classifier_stride, left);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) add8(sum, rows[k], values[k]);
  }
  for (; i < count; ++i) {
    add8(sum, load8<kAligned>(classifier + kept[i].column * g.classifier_stride, left), kept[i].value);
  }
  smooth8(sum, g.smoothing, row, column, left);
  if (g.base != nullptr) {
    const int64_t at = row * g.base_stride + column;
    for (int k = 0; k < left; ++k) {
      sum[k] += g.base_dtype == DType::kF32 ? static_cast<const float*>(g.base)[at + k]
                                            : to_float(static_cast<const To*>(g.base)[at + k]);
    }
  }
  store8<kAligned>(static_cast<To*>(g.to) + row * g.to_stride + column, sum, left, false);
}

}  // namespace

void launch_gather_hidden(const GatherHidden& g, cudaStream_t stream) {
  if (g.rows == 0) return;
  const RowBlocks blocks = row_threads(g.columns, kMostThreads);
  const dim3 grid(static_cast<unsigned>(g.rows), blocks.blocks);
  const bool aligned = is_aligned8(g.classifier, g.classifier_dtype, g.classifier_stride, g.columns) &&
                       is_aligned8(g.to, g.dtype, g.to_stride, g.columns);
  for_dtype(g.classifier_dtype, [&](auto from) {
    for_dtype(g.dtype, [&](auto to) {
      using C = decltype(from);
      using To = decltype(to);
      if (aligned) {
        gather_hidden_kernel<C, To, true><<<grid, blocks.threads, 0, stream>>>(g);
      } else {
        gather_hidden_kernel<C, To, false><<<grid, blocks.threads, 0, stream>>>(g);
      }
    });
  });
  check_launch("gather_hidden");
}

}  // namespace headroom::cuda
