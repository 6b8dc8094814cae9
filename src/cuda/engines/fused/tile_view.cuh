#pragma once
#include <cstdint>

#include "cuda/engines/fused/accumulators.cuh"
#include "cuda/engines/fused/ptx/shared_memory.cuh"
#include "cuda/engines/fused/ptx/thread.cuh"
#include "cuda/engines/fused/tile.h"

// Positions of the elements of accumulators.cuh.
namespace logitless::cuda::fused {

// The position of an epilogue's tile. The numbers are in shared memory, 16 bytes for each warp, and are read
// when needed: beside 192 accumulators registers are scarce.
template <TileLayout kLayout>
struct TileView {
  static constexpr bool kInPieces = kLayout.in_pieces;
  static constexpr int kRows = kLayout.thread_rows;

  uint32_t area;  // [vector of each warpgroup] [numbers of each warp]

  // Called by a whole warp. first_row: of the warpgroup's 128 rows. rows: rows from here on do not exist.
  // first_column: of the tile in the window.
  __device__ __forceinline__ void store(int first_row, int rows, int first_column, int partial) const {
    __syncwarp();  // all lanes have read those of the previous tile
    if (lane_index() == 0) ptx::store_shared(numbers(), first_row, rows, first_column, partial);
    __syncwarp();
  }

  __device__ __forceinline__ int first_row() const { return load<0>(); }
  __device__ __forceinline__ int rows() const { return load<4>(); }
  __device__ __forceinline__ int first_column() const { return load<8>(); }
  __device__ __forceinline__ int partial() const { return load<12>(); }
  // The warpgroup: 0 or 1.
  __device__ __forceinline__ int warpgroup() const {
    return ptx::thread_index() / 128 - kLayout.first_thread / 128;
  }
  // Room for one vector over the tile's columns.
  __device__ __forceinline__ uint32_t vector() const { return area + warpgroup() * kVectorBytes; }
  // Synchronizes all threads of the warpgroup.
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(3 + warpgroup(), 128); }

  __device__ __forceinline__ int row(int r) const {
    const int thread = ptx::thread_index() & 127;
    return first_row() + (r >> 1) * kLayout.half_rows + (thread >> 5) * kLayout.warp_rows + (r & 1) * 8 +
           ((thread & 31) >> 2);
  }
  __device__ __forceinline__ int own_row() const { return row(ptx::thread_index() & 3); }
  // The column of the thread's elements 0.
  __device__ __forceinline__ int thread_column() const { return first_column() + first_column_of_thread(); }

 private:
  __device__ __forceinline__ uint32_t numbers() const {
    return area + 2 * kVectorBytes + (ptx::thread_index() / 32 - kLayout.first_thread / 32) * kViewBytes;
  }
  template <int kOffset>
  __device__ __forceinline__ int load() const {
    return ptx::load_shared_int(numbers() + kOffset);
  }
};

}  // namespace logitless::cuda::fused
