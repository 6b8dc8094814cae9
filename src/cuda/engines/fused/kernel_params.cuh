#pragma once
#include <cstdint>

#include "cuda/engines/fused/tile.h"
#include "cuda/engines/fused/tile_schedule.h"
#include "cuda/engines/logits.h"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/softcap.h"

namespace logitless::cuda::fused {

// Parameters of the kernels of one epilogue.
template <class Args>
struct KernelParams {
  LogitsProduct product;
  Args args;
  float exponent_scale = 0;  // scale * log2(e)
  float inverse_cap = 0;     // inverse_softcap(); as a parameter it takes no register
  int32_t depth_blocks = 0;
  int32_t column_tiles = 0;
  Raster raster;
};

// block_depth: elements of depth in a stage of the pipeline.
template <class Args>
KernelParams<Args> params_of(const LogitsProduct& product, const Args& args, const Raster& raster,
                             int64_t block_depth) {
  KernelParams<Args> params;
  params.product = product;
  params.args = args;
  params.exponent_scale = product.transform.scale * kLog2E;
  params.inverse_cap = inverse_softcap(product.transform.softcap);
  params.depth_blocks = static_cast<int32_t>((product.depth + block_depth - 1) / block_depth);
  params.column_tiles = static_cast<int32_t>(tiles_of_columns(product.columns));
  params.raster = raster;
  return params;
}

// The part of the problem that one launch works on: rows below row_count, in units that have an active block
// of rows. Only these units are numbered. A warp of each block computes this once. It is kept in shared
// memory, because the computing warpgroups have no registers to spare.
struct ActiveRows {
  int rows;   // rows from here on do not exist
  int units;  // active ones
};

inline constexpr int kRowBlockRows = 128;  // of row_block_active

// Bit l: unit first + l has an active block. Called by a whole warp.
template <int kUnitRows>
__device__ __forceinline__ unsigned active_units(const uint8_t* active, int rows, int first) {
  const int unit = first + (static_cast<int>(threadIdx.x) & 31);
  bool any = false;
#pragma unroll
  for (int i = 0; i < kUnitRows / kRowBlockRows; ++i) {
    const int64_t block = static_cast<int64_t>(unit) * (kUnitRows / kRowBlockRows) + i;
    any = any || (block * kRowBlockRows < rows && active[block] != 0);
  }
  return __ballot_sync(~0u, any);
}

// Called by a whole warp.
template <int kUnitRows>
__device__ __forceinline__ ActiveRows find_active_rows(const LogitsProduct& product) {
  ActiveRows active{static_cast<int>(product.rows), 0};
  if (product.row_count != nullptr) active.rows = max(0, min(active.rows, *product.row_count));
  const int units = active.rows / kUnitRows + (active.rows % kUnitRows != 0);
  if (product.row_block_active == nullptr) {
    active.units = units;
    return active;
  }
  for (int first = 0; first < units; first += 32) {
    active.units += __popc(active_units<kUnitRows>(product.row_block_active, active.rows, first));
  }
  return active;
}

// The unit with number `index` among the active ones. Called by a whole warp.
template <int kUnitRows>
__device__ __forceinline__ int active_unit(const LogitsProduct& product, int rows, int index) {
  if (product.row_block_active == nullptr) return index;
  int first = 0;
  unsigned mask = active_units<kUnitRows>(product.row_block_active, rows, first);
  while (index >= __popc(mask)) {
    index -= __popc(mask);
    first += 32;
    mask = active_units<kUnitRows>(product.row_block_active, rows, first);
  }
  for (; index > 0; --index) mask &= mask - 1;
  return first + __ffs(mask) - 1;
}

__device__ __forceinline__ bool row_block_active(const LogitsProduct& product, int row, int rows) {
  return row < rows &&
         (product.row_block_active == nullptr || product.row_block_active[row / kRowBlockRows] != 0);
}

}  // namespace logitless::cuda::fused
