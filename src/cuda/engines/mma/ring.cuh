#pragma once
#include <cstdint>

#include "cuda/engines/fused/kernel_params.cuh"
#include "cuda/engines/fused/ptx/shared_memory.cuh"
#include "cuda/engines/fused/ptx/thread.cuh"
#include "cuda/engines/mma/config.h"
#include "cuda/engines/mma/ptx/copy_async.cuh"

// Shared memory, and its ring of stages that operands pass through.
namespace logitless::cuda::mma {

template <class Args>
struct MmaParams : KernelParams<Args> {
  int32_t stages = 0;  // kFewStages or kMostStages
  int32_t ahead = 0;   // tiles with known origins: as many as copies may be ahead of products, and one more
};

// Layout: [stages][hidden | weight] [TileView] [origins] [ActiveRows] [tiles] [threads' offsets]. These
// numbers are neither kept in registers, of which none are free beside 192 accumulators, nor recomputed in
// every stage.
struct SharedMemory {
  int stages;

  __device__ __forceinline__ static uint32_t stage(int index) {
    return ptx::dynamic_shared_address() + index * kStageBytes;
  }
  __device__ __forceinline__ uint32_t view() const { return stage(stages); }
  __device__ __forceinline__ uint32_t origin(int tile) const {
    return view() + 2 * kVectorBytes + kWarps * kViewBytes + tile % kOrigins * kOriginBytes;
  }
  __device__ __forceinline__ uint32_t active_rows() const {
    return view() + 2 * kVectorBytes + kWarps * kViewBytes + kOrigins * kOriginBytes;
  }
  __device__ __forceinline__ void store_active(ActiveRows active, int tiles) const {
    ptx::store_shared(active_rows(), active.rows, active.units, tiles, 0);
  }
  // Tiles of the block.
  __device__ __forceinline__ int tiles() const { return ptx::load_shared_int(active_rows() + 8); }
  __device__ __forceinline__ ActiveRows load_active() const {
    return {ptx::load_shared_int(active_rows()), ptx::load_shared_int(active_rows() + 4)};
  }

  // The thread's places in a stage (products.cuh).
  __device__ __forceinline__ uint32_t offsets() const {
    return active_rows() + 16 + ptx::thread_index() * kThreadBytes;
  }

  // The first row and column of the block's i-th tile, and its partial.
  __device__ __forceinline__ void store_origin(int i, int row, int column, int partial) const {
    ptx::store_shared(origin(i), row, column, partial, 0);
  }
  __device__ __forceinline__ int4 load_origin(int i) const { return ptx::load_shared_int4(origin(i)); }
};

// Computes the origin of the block's i-th tile, if there is one. Called by a whole warp.
template <class Args>
__device__ __forceinline__ void find_origin(const SharedMemory& shared, const MmaParams<Args>& params,
                                            int i) {
  if (i >= shared.tiles()) return;
  const TileSchedule schedule(params.raster, shared.load_active().units, params.column_tiles);
  const Tile tile = schedule.at(static_cast<int>(blockIdx.x) + i * schedule.clusters());
  const int unit = active_unit<kBlockRows>(params.product, shared.load_active().rows, tile.unit);
  if ((ptx::thread_index() & 31) == 0) {
    shared.store_origin(i, unit * kBlockRows, tile.column * kTileColumns, tile.partial);
  }
}

// The place of a chunk in a stage. A row of a stage has 32 elements, four chunks of 16 bytes. Chunk c of row
// r lies where c xor (r / 2 mod 4) would lie unswizzled. Banks have 4 bytes, so 8 consecutive chunks use all
// of them. The same chunk of 8 rows, one matrix of ldmatrix, lies in 4 (r mod 2) + (c xor (r / 2 mod 4))
// modulo 8: each of the 8 once. A quarter of a warp copies two whole rows: again each of the 8 once.
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row >> 1 & 3)) << 4);
}

// Waits for the next stage, in the middle of a stage. A stage's copies form a group. The copies of later
// stages may still run: all stages of the ring except the current, the previous and the next one. kMore: one
// more, as before the first stage.
template <int kMore>
__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages == kMostStages) {
    ptx::copy_async_wait<kMostStages - 3 + kMore>();
  } else {
    ptx::copy_async_wait<kFewStages - 3 + kMore>();
  }
  __syncthreads();
}

}  // namespace logitless::cuda::mma
