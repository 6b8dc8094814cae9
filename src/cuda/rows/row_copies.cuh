#pragma once
#include "cuda/rows/vector8.cuh"

// The parts of RowsCopy's kernels.
namespace logitless::cuda {

__device__ inline bool row_exists(const RowsCopy& c, int64_t r) {
  return r < existing(c.row_count, c.rows) && (c.target == nullptr || c.target[r] != kIgnoredRow);
}

// All threads of a block call this.
__device__ inline bool holds(const Condition& condition) {
  if (condition.bytes == nullptr) return true;
  const auto* bytes = static_cast<const uint8_t*>(condition.bytes);
  bool any = false;
  for (int64_t i = threadIdx.x; i < condition.count; i += blockDim.x) any |= bytes[i] != 0;
  return __syncthreads_or(any) != 0;
}

// The memory that a row's elements may be loaded from. It includes neighbouring rows if they are known to be
// there.
template <class From>
__device__ inline Extent readable_of(const RowsCopy& c, const From* row) {
  return c.row_map != nullptr ? extent_of(row, c.columns) : extent_of<From>(c.from, c.rows, c.columns);
}

__device__ __forceinline__ int left_of(int64_t columns, int64_t i) {
  return static_cast<int>(min(columns - i, int64_t{8}));
}

}  // namespace logitless::cuda
