#pragma once
#include <cstdint>

#include "cuda/engines/fused/ptx/math.cuh"
#include "cuda/engines/fused/ptx/thread.cuh"
#include "cuda/engines/fused/tile.h"

// How a warpgroup's threads hold its tile. Only this file and tile_view.cuh know it. A thread holds, of a
// tile of 128 x 192, 48 elements of each of four rows:
//   acc[r / 2][4 j + 2 (r % 2) + b]: row half_rows (r / 2) + warp_rows warp + 8 (r % 2) + lane / 4, column
//   8 j + 2 (lane % 4) + b
// for r in 0..3, j in 0..23, b in 0..1, with the numbers of a TileLayout. wgmma and mma.sync leave blocks of
// 16 rows in this form. The four lanes of a quad share their four rows. Lane q owns row r = q: only it reads
// and writes the row's vectors and partials, so the 128 threads own the 128 rows.
//
// Epilogues access elements (r, i), i in 0..47, by element(), and their columns by column_of().
namespace logitless::cuda::fused {

inline constexpr int kQuadRows = 4;                    // of a thread
inline constexpr int kRowElements = kTileColumns / 4;  // of a thread in a row
inline constexpr unsigned kWarp = 0xffffffffu;

using Accumulators = float[2][kTileColumns / 2];

__device__ __forceinline__ int lane_index() {
  return ptx::thread_index() & 31;
}

// Element i of row r. Neighbours i = 2 j and 2 j + 1 are neighbouring columns.
__device__ __forceinline__ float& element(Accumulators& acc, int r, int i) {
  return acc[r >> 1][4 * (i >> 1) + 2 * (r & 1) + (i & 1)];
}
__device__ __forceinline__ const float& element(const Accumulators& acc, int r, int i) {
  return acc[r >> 1][4 * (i >> 1) + 2 * (r & 1) + (i & 1)];
}

// The columns from the thread's first one, TileView::thread_column(), to that of its elements i.
__device__ __forceinline__ int column_of(int i) {
  return 8 * (i >> 1) + (i & 1);
}

// The thread's elements of one row.
struct RowElements {
  const Accumulators& acc;
  int r;

  __device__ __forceinline__ float at(int i) const { return element(acc, r, i); }
};

// Applies a function to all elements of the thread, in any order.
template <class Function>
__device__ __forceinline__ void for_each(Accumulators& acc, const Function& function) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kTileColumns / 2; ++i) acc[half][i] = function(acc[half][i]);
  }
}

// Elements that the compiler may work on at once if each needs several registers on the way.
inline constexpr int kBlock = 16;

// Applies a function to all elements, kBlock at a time.
template <class Function>
__device__ __forceinline__ void for_each_in_blocks(Accumulators& acc, const Function& function) {
#pragma unroll
  for (int block = 0; block < kTileColumns / kBlock; ++block) {
    if (ptx::always()) {
      float* z = acc[block / (kTileColumns / 2 / kBlock)] + block % (kTileColumns / 2 / kBlock) * kBlock;
#pragma unroll
      for (int i = 0; i < kBlock; ++i) z[i] = function(z[i]);
    }
  }
}

// The value of the lane that owns row r.
template <class T>
__device__ __forceinline__ T from_owner(T value, int r) {
  return __shfl_sync(kWarp, value, (lane_index() & 28) | r);
}

// Picks the value of the lane's own row from four values, one for each row.
template <class T>
__device__ __forceinline__ T own_of(const T (&values)[kQuadRows]) {
  const int lane = lane_index();
  const T low = (lane & 1) ? values[1] : values[0];
  const T high = (lane & 1) ? values[3] : values[2];
  return (lane & 2) ? high : low;
}

// Sums over the quad's four lanes, each to its owner: 3 shuffles.
__device__ __forceinline__ float sum_to_owner(const float (&values)[kQuadRows]) {
  const int lane = lane_index();
  const bool odd = lane & 1;
  const bool high = lane & 2;
  const float low_rows =
      (odd ? values[1] : values[0]) + __shfl_xor_sync(kWarp, odd ? values[0] : values[1], 1);
  const float high_rows =
      (odd ? values[3] : values[2]) + __shfl_xor_sync(kWarp, odd ? values[2] : values[3], 1);
  return (high ? high_rows : low_rows) + __shfl_xor_sync(kWarp, high ? low_rows : high_rows, 2);
}

__device__ __forceinline__ float quad_max(float value) {
  value = ptx::max_nan(value, __shfl_xor_sync(kWarp, value, 1));
  return ptx::max_nan(value, __shfl_xor_sync(kWarp, value, 2));
}

__device__ __forceinline__ int quad_min(int value) {
  value = min(value, __shfl_xor_sync(kWarp, value, 1));
  return min(value, __shfl_xor_sync(kWarp, value, 2));
}

// The tile's group of columns that the thread holds, below kTopGroups.
__device__ __forceinline__ int column_group() {
  return ptx::thread_index() & 3;
}

// The columns from the tile's first one to the thread's first one.
__device__ __forceinline__ int first_column_of_thread() {
  return 2 * (ptx::thread_index() & 3);
}

// Whether a column, counted from the thread's first one, belongs to the thread.
__device__ __forceinline__ bool is_of_thread(int column) {
  return column >= 0 && (column & 7) < 2;
}

}  // namespace logitless::cuda::fused
