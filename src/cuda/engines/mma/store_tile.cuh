#pragma once
#include <cstdint>

#include "cuda/engines/fused/ptx/math.cuh"
#include "cuda/engines/fused/ptx/shared_memory.cuh"
#include "cuda/engines/mma/products.cuh"

namespace logitless::cuda::mma {

// Bytes of a row of a piece in shared memory: 64 numbers of 16 bits and 16 bytes of padding, so 36 words. The
// 8 rows and 4 pairs of columns that a warp writes at once are then in 4 (row mod 8) + pair mod 32, all
// banks. A quarter of a warp reads one row.
inline constexpr int kPieceRowBytes = kStoreColumns * 2 + 16;
static_assert(16 * kPieceRowBytes <= kPassBytes);

// Stores a warp's part of the tile, times 2^kExponent, as 16-bit numbers. Pieces of 16 x 64 pass through the
// warp's room of kPassBytes and go out as whole rows. rows: of the matrix.
template <DType kType, int kExponent, class View>
__device__ __forceinline__ void store_tile(const Accumulators& acc, const View& tile,
                                           const StoredColumns& out, int rows, uint32_t pass) {
  const int lane = lane_index();
  const uint32_t room = pass + warp_index() * kPassBytes;
  const uint32_t written = room + (lane >> 2) * kPieceRowBytes + (lane & 3) * 4;
  const uint32_t read = room + (lane >> 3) * kPieceRowBytes + (lane & 7) * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first_row =
        tile.first_row() + (warp_index() & 3) * kLayout.warp_rows + half * kLayout.half_rows + (lane >> 3);
#pragma unroll
    for (int piece = 0; piece < kTileColumns / kStoreColumns; ++piece) {
      __syncwarp();  // the previous piece has been read
#pragma unroll
      for (int j = 0; j < kStoreColumns / 8; ++j) {
        const float* d = acc[half] + piece * (kStoreColumns / 2) + 4 * j;
        ptx::store_shared(written + j * 16, ptx::pack_scaled<kType, kExponent>(d[0], d[1]));
        ptx::store_shared(written + 8 * kPieceRowBytes + j * 16,
                          ptx::pack_scaled<kType, kExponent>(d[2], d[3]));
      }
      __syncwarp();
      const int column = tile.first_column() + piece * kStoreColumns + (lane & 7) * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 vector = ptx::load_shared_uint4(read + i * 4 * kPieceRowBytes);
        const int row = first_row + 4 * i;
        if (row < rows && column < out.columns) {
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out.data) + row * out.stride + column) = vector;
        }
      }
    }
  }
}

}  // namespace logitless::cuda::mma
