#pragma once
#include "cuda/engines/fused/epilogue_common.cuh"
#include "cuda/engines/fused/epilogue_draw.cuh"
#include "cuda/engines/fused/epilogue_stats.cuh"

// Row statistics, and lists of large logits: those that are not below the row's threshold. With group_max
// only the maxima of each thread's columns are made, from which thresholds follow. The products and their
// order are the same, so no maximum exceeds the logits that the lists are made from.
namespace logitless::cuda::fused {

template <class View>
__device__ __forceinline__ void store_group_maxima(const Accumulators& acc, const View& tile,
                                                   const TopLogits& top) {
  const int64_t group = tile.first_column() / kTileColumns * kTopGroups + column_group();
#pragma unroll
  for (int r = 0; r < View::kRows; ++r) {
    const ThreadMaximum largest(acc, r);
    const int row = tile.row(r);
    if (row < tile.rows()) top.group_max[row * top.groups + group] = largest.value();
  }
}

// Marks the thread's elements of a row that are not below its threshold, or are NaN, as bits i. These are
// masks because 48 predicates would spill.
__device__ __forceinline__ uint64_t not_below(const RowElements& row, float threshold) {
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < kRowElements; ++i) {
    (i < 32 ? low : high) |= ptx::mask_not_below(row.at(i), threshold) & (1u << (i & 31));
  }
  return static_cast<uint64_t>(high) << 32 | low;
}

// Lists elements in any order: the list is sorted later.
__device__ __forceinline__ void list_elements(const RowElements& row, uint64_t marked, const TopLogits& top,
                                              int index, int first_column) {
  int at = marked != 0 ? atomicAdd(top.count + index, __popcll(marked)) : 0;
  if (at >= top.capacity) marked = 0;
  while (__any_sync(kWarp, marked != 0)) {
    const int bit = __ffsll(static_cast<long long>(marked)) - 1;
    marked &= marked - 1;
    float z = 0.f;
#pragma unroll
    for (int i = 0; i < kRowElements; ++i) z = i == bit ? row.at(i) : z;
    if (bit >= 0 && at < top.capacity) {
      top.listed[static_cast<int64_t>(index) * top.capacity + at] = {z, first_column + column_of(bit)};
    }
    ++at;
  }
}

template <class View>
__device__ __forceinline__ void list_large(const Accumulators& acc, const View& tile, const TopLogits& top,
                                           int column_offset) {
  const int own_row = tile.own_row();
  const float own_threshold = own_row < tile.rows() ? top.threshold[own_row] : 0.f;
#pragma unroll
  for (int r = 0; r < View::kRows; ++r) {
    if (!ptx::always()) continue;  // one row at a time: registers are scarce
    const RowElements elements{acc, r};
    const float threshold = from_owner(own_threshold, r);
    const int row = tile.row(r);
    const uint64_t marked = row < tile.rows() ? not_below(elements, threshold) : 0;
    if (!__any_sync(kWarp, marked != 0)) continue;
    list_elements(elements, marked, top, row, column_offset + tile.thread_column());
  }
}

// Lists are made before the statistics, which leave no registers for whole tiles.
template <class View>
__device__ __forceinline__ void top_epilogue(Accumulators& acc, const View& tile,
                                             const LogitsProduct& product, const TopArgs& args,
                                             float exponent_scale) {
  transform(acc, tile, product);
  apply_mask(acc, tile, product);
  if (args.top.group_max != nullptr) {
    store_group_maxima(acc, tile, args.top);
    return;
  }
  list_large(acc, tile, args.top, static_cast<int>(product.column_offset));
  stats_epilogue</*kGeneral=*/true, /*kTransforms=*/false>(acc, tile, product, args, exponent_scale);
}

}  // namespace logitless::cuda::fused
