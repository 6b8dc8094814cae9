#pragma once
#include <cstdint>

#include "cuda/engines/mma/ptx/copy_async.cuh"
#include "cuda/engines/mma/ring.cuh"

// Copies operands into the ring: a quad of lanes for each row, 64 rows at a time.
namespace logitless::cuda::mma {

inline constexpr int kRowsAtOnce = kThreads / 4;

// Copies a stage's block of depth of rows first_row.. of a matrix [rows, depth]. Elements outside of the
// matrix become 0.
template <int kRows>
__device__ __forceinline__ void copy_rows(uint32_t to, const void* matrix, int64_t stride, int first_row,
                                          int rows, int first_depth, int depth) {
  const int thread = ptx::thread_index();
  const int chunk = thread & 3;
  const int row = first_row + (thread >> 2);
  const int left = depth - first_depth - chunk * 8;  // elements
  const int bytes = left <= 0 ? 0 : left < 8 ? 2 * left : 16;
  const char* from = static_cast<const char*>(matrix) + 2 * (row * stride + (first_depth + chunk * 8));
  const uint32_t place = to + chunk_offset(thread >> 2, chunk);
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int at = i * kRowsAtOnce;
    const bool exists = row + at < rows && bytes > 0;
    ptx::copy_async(place + at * kRowBytes, exists ? from + 2 * at * stride : matrix, exists ? bytes : 0);
  }
}

// Copies a tile's rows [kFirst, kEnd), all of which exist. from: the thread's chunk of the first row that it
// copies.
template <int kFirst, int kEnd>
__device__ __forceinline__ void copy_whole_rows(uint32_t to, const char* from, int64_t stride) {
#pragma unroll
  for (int row = kFirst; row < kEnd; row += kRowsAtOnce) {
    ptx::copy_async(to + row * kRowBytes, from + 2 * row * stride);
  }
}

// The addresses that the thread's copies of a whole tile read, from a block of depth on.
struct Source {
  const char *hidden, *weight;

  // For the block's i-th tile.
  template <class Args>
  __device__ __forceinline__ Source(const SharedMemory& shared, const MmaParams<Args>& params, int i,
                                    int block) {
    const LogitsProduct& product = params.product;
    const int4 origin = shared.load_origin(i);
    const int row = ptx::thread_index() >> 2, element = block * kBlockDepth + (ptx::thread_index() & 3) * 8;
    hidden =
        static_cast<const char*>(product.hidden) + 2 * ((origin.x + row) * product.hidden_stride + element);
    weight =
        static_cast<const char*>(product.weight) + 2 * ((origin.y + row) * product.weight_stride + element);
  }
  __device__ __forceinline__ void advance() {
    hidden += kRowBytes;
    weight += kRowBytes;
  }
};

// Returns whether all of the block's i-th tile lies in the matrices. Rows count whether computed or not.
template <class Args>
__device__ __forceinline__ bool is_whole(const SharedMemory& shared, const MmaParams<Args>& params, int i) {
  const LogitsProduct& product = params.product;
  const int4 origin = shared.load_origin(i);
  return origin.x + kBlockRows <= product.rows && origin.y + kTileColumns <= product.columns &&
         product.depth % kBlockDepth == 0;
}

// Copies the block's tiles one after another, a stage at a time, whole or not.
class Loader {
 public:
  // Begins at the block's stage number `stage`, counted through all tiles.
  __device__ __forceinline__ Loader(int stage, int depth_blocks)
      : tile_(stage / depth_blocks), block_(stage % depth_blocks) {}

  // Starts the copies of the next stage, makes a group of them, and goes on to the following stage.
  template <class Args>
  __device__ __forceinline__ void copy(const SharedMemory& shared, const MmaParams<Args>& params,
                                       uint32_t stage) {
    if (tile_ < shared.tiles()) {
      const LogitsProduct& product = params.product;
      const int4 origin = shared.load_origin(tile_);
      const int first = block_ * kBlockDepth, depth = static_cast<int>(product.depth);
      copy_rows<kBlockRows>(stage, product.hidden, product.hidden_stride, origin.x,
                            static_cast<int>(product.rows), first, depth);
      copy_rows<kTileColumns>(stage + kHiddenBytes, product.weight, product.weight_stride, origin.y,
                              static_cast<int>(product.columns), first, depth);
    }
    ptx::copy_async_commit();
    if (++block_ < params.depth_blocks) return;
    block_ = 0;
    ++tile_;
  }

 private:
  int tile_;
  int block_;  // of depth
};

}  // namespace logitless::cuda::mma
