#include "cuda/run/thinned/thinned.h"
#include "cuda/run/thinned/vector8.cuh"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
// Columns that are worked on in all rows before the next ones are: so few that the classifier's part in L2
// serves all rows.
constexpr int64_t kSliceBytes = int64_t{40} << 20;

// kLanes threads a row and slice of 8 kLanes of its columns. Blocks of the same slice run side by side.
template <class C, class To, int kLanes, bool kAligned, bool kSmooth>
__global__ void __launch_bounds__(kThreads, kAligned && sizeof(C) == 2 ? 4 : 2)
    gather_hidden_kernel(GatherHidden g) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t column = (int64_t{blockIdx.y} * kLanes + threadIdx.x % kLanes) * 8;
  if (row >= g.rows || column >= g.columns) return;
  const int left = static_cast<int>(min(g.columns - column, int64_t{8}));
  if (g.target != nullptr && g.target[row] == kIgnoredRow) {
    store8<kAligned>(static_cast<To*>(g.to) + row * g.to_stride + column, {}, left, false);
    return;
  }
  const Kept* kept = g.kept + row * g.capacity;
  const int count = g.kept_count[row];
  const C* classifier = static_cast<const C*>(g.classifier) + column;
  const Extent readable =
      extent_of(static_cast<const C*>(g.classifier), g.vocab, g.classifier_stride, g.columns);
  constexpr int kInFlight = kAligned ? 8 : 4;  // classifier rows that a thread waits for at once
  float sum[8] = {};
  int i = 0;
  for (; i + kInFlight <= count; i += kInFlight) {
    Loading8<kAligned, C> rows[kInFlight];
    float values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const Kept element = kept[i + k];
      values[k] = element.value;
      rows[k] = start_load8<kAligned>(classifier + element.column * g.classifier_stride, left, readable);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) add8(sum, end_load8(rows[k], left), values[k], g.operand_dtype);
  }
  for (; i < count; ++i) {
    const auto row = start_load8<kAligned>(classifier + kept[i].column * g.classifier_stride, left, readable);
    add8(sum, end_load8(row, left), kept[i].value, g.operand_dtype);
  }
  if constexpr (kSmooth) smooth8(sum, g.smoothing, row, column, left);
  if (g.base != nullptr) {
    const int64_t at = row * g.base_stride + column;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k >= left) break;
      sum[k] += g.base_dtype == DType::kF32 ? static_cast<const float*>(g.base)[at + k]
                                            : to_float(static_cast<const To*>(g.base)[at + k]);
    }
  }
  store8<kAligned>(static_cast<To*>(g.to) + row * g.to_stride + column, sum, left, false);
}

template <class C, class To, int kLanes>
void launch(const GatherHidden& g, bool aligned, const Queue& queue) {
  const dim3 grid(blocks_for(g.rows, kThreads / kLanes), blocks_for(g.columns, 8 * kLanes));
  for_gather(aligned, g.smoothing.sum != nullptr, [&](auto is_aligned, auto is_smooth) {
    queue.launch(gather_hidden_kernel<C, To, kLanes, is_aligned.value, is_smooth.value>, grid, kThreads, 0,
                 g);
  });
}

}  // namespace

void launch_gather_hidden(const GatherHidden& g, const Queue& queue) {
  if (g.rows == 0) return;
  const bool aligned = is_aligned8(g.classifier, g.classifier_dtype, g.classifier_stride, g.columns) &&
                       is_aligned8(g.to, g.dtype, g.to_stride, g.columns);
  const int64_t slice_bytes = 16 * 8 * g.vocab * static_cast<int64_t>(size_of(g.classifier_dtype));
  for_dtype(g.classifier_dtype, [&](auto from) {
    for_dtype(g.dtype, [&](auto to) {
      using C = decltype(from);
      using To = decltype(to);
      if (slice_bytes > kSliceBytes) {
        launch<C, To, 8>(g, aligned, queue);
      } else {
        launch<C, To, 16>(g, aligned, queue);
      }
    });
  });
  check_launch("gather_hidden");
}

}  // namespace logitless::cuda
