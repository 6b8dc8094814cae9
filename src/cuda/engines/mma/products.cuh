#pragma once
#include <cstdint>

#include "cuda/engines/fused/tile_view.cuh"
#include "cuda/engines/mma/ptx/ldmatrix.cuh"
#include "cuda/engines/mma/ptx/mma_sync.cuh"
#include "cuda/engines/mma/ring.cuh"

// Products of a warp: 64 rows, those of its pair, by 96 columns.
//
// The warp keeps 32 of these rows and gives the other 32 away (exchange.cuh). Blocks of 16 rows m = 0, 1 are
// kept, m = 2, 3 are given: acc[m % 2][48 (m / 2) + 4 j + i] is element i of D (mma_sync.cuh) of block m and
// columns 8 j.. of the warp's.
namespace logitless::cuda::mma {

__device__ __forceinline__ int warp_index() {
  return ptx::thread_index() >> 5;
}

// A thread's places in a stage, for the first 16 elements of depth. The other 16 are two chunks further:
// their addresses differ in bit 5 only, whatever the swizzle of the row's chunks.
struct StageOffsets {
  uint32_t kept, given;  // the lane's first addresses for ldmatrix, in rows of hidden
  uint32_t weight;
  uint32_t copied;  // the chunk that it copies in its first row (loader.cuh)

  __device__ static __forceinline__ StageOffsets of_thread() {
    const int thread = ptx::thread_index(), lane = lane_index(), warp = warp_index();
    // Lanes 0..15 give the rows of elements 0..7, lanes 16..31 those of 8..15: a[0..3] in this order.
    const uint32_t of_lane = chunk_offset(lane & 15, lane >> 4);
    const int first = warp * (kPairRows / 2);
    StageOffsets at;
    at.kept = first * kRowBytes + of_lane;
    at.given = (first ^ (kPairRows / 2)) * kRowBytes + of_lane;
    // Lanes 0..7 and 8..15 give 8 columns, elements 0..7 and 8..15 of depth: b0 and b1. The other lanes give
    // those of the next 8 columns.
    at.weight = kHiddenBytes + (warp & 1) * (kWarpColumns * kRowBytes) +
                chunk_offset((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
    at.copied = chunk_offset(thread >> 2, thread & 3);
    return at;
  }
  __device__ __forceinline__ void store(const SharedMemory& shared) const {
    ptx::store_shared(shared.offsets(), kept, given, weight, copied);
  }
  __device__ static __forceinline__ StageOffsets load(const SharedMemory& shared) {
    const uint4 at = ptx::load_shared_uint4(shared.offsets());
    return {at.x, at.y, at.z, at.w};
  }
};

// A step: the first or second 16 elements of depth of a stage.
struct Step {
  uint32_t stage;
  int half;
};

// Operands of a step: all of the warp's rows, and the next 16 of its columns.
struct Fragments {
  uint32_t a[4][4];
  uint32_t b[4];

  // Bit 5 is flipped before rows are added, which leave it unchanged.
  __device__ __forceinline__ void load_rows(const StageOffsets& at, Step step, int m) {
    const uint32_t first = (step.stage + (m < 2 ? at.kept : at.given)) ^ (32 * step.half);
    ptx::load_matrices(a[m], first + m % 2 * 16 * kRowBytes);
  }
  __device__ __forceinline__ void load_columns(const StageOffsets& at, Step step, int first) {
    ptx::load_matrices(b, ((step.stage + at.weight) ^ (32 * step.half)) + first * kRowBytes);
  }
  __device__ __forceinline__ void load(const StageOffsets& at, Step step) {
#pragma unroll
    for (int m = 0; m < 4; ++m) load_rows(at, step, m);
    load_columns(at, step, 0);
  }
};

// Pieces of a step: 16 columns each.
inline constexpr int kPieces = kWarpColumns / 16;

// Adds a step's products, whose fragments have been loaded, and loads the fragments of the next step as
// registers become free. Calls between(i) after piece i.
template <DType kType, class Between>
__device__ __forceinline__ void multiply_step(Accumulators& acc, Fragments& fragments, const StageOffsets& at,
                                              Step step, Step next, const Between& between) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const bool is_last = i + 1 == kPieces;
    const uint32_t b[4] = {fragments.b[0], fragments.b[1], fragments.b[2], fragments.b[3]};
    fragments.load_columns(at, is_last ? next : step, is_last ? 0 : 16 * (i + 1));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float* d = acc[m & 1] + (m >> 1) * (kWarpColumns / 2) + 8 * i;
      ptx::multiply<kType>(d, fragments.a[m], b[0], b[1]);
      ptx::multiply<kType>(d + 4, fragments.a[m], b[2], b[3]);
      if (is_last) fragments.load_rows(at, next, m);
    }
    between(i);
  }
}

}  // namespace logitless::cuda::mma
