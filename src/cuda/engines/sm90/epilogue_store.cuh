#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/engines/fused/epilogue_common.cuh"
#include "cuda/engines/fused/tile_view.cuh"
#include "cuda/engines/sm90/config.h"
#include "cuda/engines/sm90/ptx.cuh"

namespace logitless::cuda::sm90 {

// Stores a warpgroup's tile, times 2^kExponent, as 16-bit numbers. Pieces of 128 x 64 go to a swizzled buffer
// in shared memory. From there the copy engine stores them while the next piece is prepared; it leaves out
// elements past the matrix. staging: the first computing warpgroup's buffers, followed by the other's.
template <Config kConfig, DType kType, int kExponent, class View>
__device__ __forceinline__ void store_tile(const Accumulators& acc, const View& tile, const CUtensorMap* out,
                                           uint32_t staging) {
#pragma unroll
  for (int piece = 0; piece < kTileColumns / kStoreColumns; ++piece) {
    const int warpgroup = ptx::thread_index() / 128 - 1;
    const int thread = ptx::thread_index() & 127;
    const int barrier = 3 + warpgroup;
    // Lanes 0..15 give the rows of the left 16-byte chunk of a pair, lanes 16..31 those of the right one.
    const int row = (thread >> 5) * 16 + (thread & 15);
    const int side = (thread & 31) >> 4;
    const uint32_t buffer = staging + warpgroup * (kConfig.staging_bytes() / 2) +
                            piece % kConfig.staging_buffers * kConfig.staging_buffer_bytes();
    // The store that last used the buffer must have read it. All stores of the previous tile have, long
    // since.
    if (thread == 0) {
      if (piece == 0) {
        ptx::tma_store_wait_read<0>();
      } else {
        ptx::tma_store_wait_read<kConfig.staging_buffers - 1>();
      }
    }
    ptx::named_barrier_sync(barrier, 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const int chunk = quarter * 2 + side;
        const float* d = acc[half] + piece * 32 + quarter * 8;
        ptx::store_matrices(
            buffer + (half * 64 + row) * 128 + ((chunk ^ (row & 7)) << 4),
            ptx::pack_scaled<kType, kExponent>(d[0], d[1]), ptx::pack_scaled<kType, kExponent>(d[2], d[3]),
            ptx::pack_scaled<kType, kExponent>(d[4], d[5]), ptx::pack_scaled<kType, kExponent>(d[6], d[7]));
      }
    }
    ptx::fence_shared_to_copy_engine();
    ptx::named_barrier_sync(barrier, 128);
    if (thread == 0) {
      ptx::tma_store(out, buffer, tile.first_column() + piece * kStoreColumns, tile.first_row());
      ptx::tma_store_commit();
    }
  }
}

}  // namespace logitless::cuda::sm90
