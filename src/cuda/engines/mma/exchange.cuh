#pragma once
#include <cstdint>

#include "cuda/engines/fused/ptx/shared_memory.cuh"
#include "cuda/engines/mma/products.cuh"

// Turns the products' elements, 64 rows by 96 columns of a warp, into those of epilogues, 32 rows by 192
// columns (tile_view.cuh). The two warps of a pair have the same rows: lane by lane each gives the other its
// elements of the rows that the other keeps.
namespace logitless::cuda::mma {

// Vectors of 4 elements that are exchanged at once: 24 elements of a lane, which are 3072 bytes of a warp.
inline constexpr int kPassVectors = 6;
static_assert(kPassVectors * 32 * 16 <= kPassBytes && kWarpColumns / 2 % (4 * kPassVectors) == 0);

// pass: the block's room, kPassBytes for each warp, which no warp reads any more. Called by both warps of the
// pair.
__device__ __forceinline__ void exchange_halves(Accumulators& acc, uint32_t pass) {
  const int warp = warp_index();
  const bool is_right = warp & 1;  // its columns are the right half
  const uint32_t mine = pass + warp * kPassBytes + lane_index() * 16;
  const uint32_t theirs = pass + (warp ^ 1) * kPassBytes + lane_index() * 16;
  const int barrier = 5 + (warp >> 1);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int first = 0; first < kWarpColumns / 2; first += 4 * kPassVectors) {
      if (!ptx::always()) continue;  // one pass after the other, for lack of registers
      float* const kept = acc[half] + first;
      float* const given = kept + kWarpColumns / 2;
#pragma unroll
      for (int i = 0; i < kPassVectors; ++i) {
        const float* from = given + 4 * i;
        ptx::store_shared(mine + i * 512, make_float4(from[0], from[1], from[2], from[3]));
      }
      ptx::named_barrier_sync(barrier, 64);
#pragma unroll
      for (int i = 0; i < kPassVectors; ++i) {
        const float4 vector = ptx::load_shared_float4(theirs + i * 512);
        const float got[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float own = kept[4 * i + e];
          kept[4 * i + e] = is_right ? got[e] : own;
          given[4 * i + e] = is_right ? own : got[e];
        }
      }
      // The other warp must have read before more is written.
      ptx::named_barrier_sync(barrier, 64);
    }
  }
}

}  // namespace logitless::cuda::mma
