#include "cuda/rows/gather8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
// The columns of a slice are done in all rows before the next slice. A slice is small enough that the
// weight's part in L2 serves all rows.
constexpr int64_t kSliceBytes = int64_t{40} << 20;

// kLanes threads for each row and slice of 8 kLanes of its columns. Blocks of the same slice run side by
// side.
template <class C, class To, int kLanes, bool kAligned, bool kSmooth, class Real = RealOf<C>>
__global__ void __launch_bounds__(kThreads, kAligned && sizeof(C) == 2 ? 4
                                            : sizeof(C) == 8           ? 1
                                                                       : 2)
    gather_hidden_kernel(GatherHiddenOf<Real> g) {
  const RowListsOf<Real>& t = g.lists;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t column = (int64_t{blockIdx.y} * kLanes + threadIdx.x % kLanes) * 8;
  if (row >= t.rows || column >= g.columns) return;
  const int left = static_cast<int>(min(g.columns - column, int64_t{8}));
  if (g.zero_rows != nullptr && g.zero_rows[row] == kIgnoredRow) {
    store8<kAligned>(g.to.template row<To>(row) + column, {}, left, false);
    return;
  }
  const KeptOf<Real>* kept = t.elements + (t.offsets != nullptr ? t.offsets[row] : row * t.capacity);
  const int count = t.count[row];
  const C* weight = g.weight.template row<C>(0) + column;
  const Extent readable = extent_of<C>(g.weight, t.columns, g.columns);
  constexpr int kInFlight = kAligned ? 8 : 4;  // weight rows that a thread waits for at once
  Real sum[8] = {};
  int i = 0;
  for (; i + kInFlight <= count; i += kInFlight) {
    Loading8<kAligned, C> rows[kInFlight];
    Real values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const KeptOf<Real> element = kept[i + k];
      values[k] = element.value;
      rows[k] = start_load8<kAligned>(weight + element.column * g.weight.stride, left, readable);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) add8(sum, end_load8(rows[k], left), values[k], g.operand_dtype);
  }
  for (; i < count; ++i) {
    const auto row = start_load8<kAligned>(weight + kept[i].column * g.weight.stride, left, readable);
    add8(sum, end_load8(row, left), kept[i].value, g.operand_dtype);
  }
  if constexpr (kSmooth) smooth8(sum, g.smoothing, row, column, left);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k >= left || g.base.data == nullptr) break;
    sum[k] += g.base.dtype == DType::kF32 ? g.base.template row<float>(row)[column + k]
                                          : to_real(g.base.template row<To>(row)[column + k]);
  }
  store8<kAligned>(g.to.template row<To>(row) + column, sum, left, false);
}

template <class C, class To, int kLanes, class Real = RealOf<C>>
void launch(const GatherHiddenOf<Real>& g, bool aligned, const Queue& queue) {
  const dim3 grid(blocks_for(g.lists.rows, kThreads / kLanes), blocks_for(g.columns, 8 * kLanes));
  for_gather<Real>(aligned, g.smoothing.sum != nullptr, [&](auto is_aligned, auto is_smooth) {
    queue.launch("gather_hidden", gather_hidden_kernel<C, To, kLanes, is_aligned.value, is_smooth.value>,
                 grid, kThreads, 0, g);
  });
}

}  // namespace

template <class Real>
void launch_gather_hidden(const GatherHiddenOf<Real>& g, const Queue& queue) {
  if (g.lists.rows == 0) return;
  const bool aligned = is_aligned8(g.weight, g.columns) && is_aligned8(g.to, g.columns);
  const int64_t slice_bytes = 16 * 8 * g.lists.columns * static_cast<int64_t>(size_of(g.weight.dtype));
  for_dtype<Real>(g.weight.dtype, [&](auto from) {
    for_dtype<Real>(g.to.dtype, [&](auto to) {
      using C = decltype(from);
      using To = decltype(to);
      if (slice_bytes > kSliceBytes) {
        launch<C, To, 8>(g, aligned, queue);
      } else {
        launch<C, To, 16>(g, aligned, queue);
      }
    });
  });
}

template void launch_gather_hidden(const GatherHiddenOf<float>&, const Queue&);
template void launch_gather_hidden(const GatherHiddenOf<double>&, const Queue&);

}  // namespace logitless::cuda
