#pragma once
#include <cstdint>

#include "cuda/engines/mma/ptx/copy_async.cuh"
#include "cuda/engines/mma/ring.cuh"

// Copies of operands into the ring: a quad of lanes a row, 64 rows at a time.
namespace headroom::cuda::mma {

inline constexpr int kRowsAtOnce = kThreads / 4;

// Rows first_row.. of a matrix [rows, depth], a stage's block of depth of it. What is outside of the matrix
// becomes 0.
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

// The same of rows that are all there, from the thread's chunk of the first of them on.
template <int kRows>
__device__ __forceinline__ void copy_whole_rows(uint32_t to, const char* from, int64_t stride) {
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    ptx::copy_async(to + i * kRowsAtOnce * kRowBytes, from);
    from += 2 * kRowsAtOnce * stride;
  }
}

// Copies of the block's tiles one after another, a stage at a time. The thread's pointers in shared memory
// are those of its chunk in the tile that is copied, at depth 0: null, of a tile that is not whole.
class Loader {
 public:
  // At the first stage of the block's.
  template <class Args>
  __device__ static __forceinline__ Loader begin(const SharedMemory& shared, const MmaParams<Args>& params) {
    const Loader loader(0, params.depth_blocks);
    loader.find_pointers(shared, params);
    return loader;
  }
  // At its stage number `step`, all tiles counted through, as another loader left it.
  __device__ __forceinline__ Loader(int step, int depth_blocks)
      : tile_(step / depth_blocks), block_(step % depth_blocks) {}

  // Where the thread's copies of the next stage read; null: they are not whole.
  struct Source {
    const char *hidden, *classifier;
  };
  template <class Args>
  __device__ __forceinline__ Source source(const SharedMemory& shared, const MmaParams<Args>& params) const {
    const bool whole = (block_ + 1) * kBlockDepth <= static_cast<int>(params.product.depth);
    Source from;
    ptx::load_shared_pointers(shared.pointers(), from.hidden, from.classifier);
    if (!whole) from.hidden = nullptr;
    return from;
  }

  // Starts those of the next stage's hidden rows into `stage`, where they are whole. place: of the thread's
  // chunk in a stage.
  template <class Args>
  __device__ __forceinline__ void copy_hidden(const MmaParams<Args>& params, const Source& from,
                                              uint32_t stage, uint32_t place) const {
    if (from.hidden == nullptr) return;
    copy_whole_rows<kBlockRows>(stage + place, from.hidden + block_ * kRowBytes,
                                params.product.hidden_stride);
  }
  // Then those of its classifier's rows, or all of what is not whole; makes a group of both and goes on to
  // the stage after.
  template <class Args>
  __device__ __forceinline__ void copy_classifier(const SharedMemory& shared, const MmaParams<Args>& params,
                                                  const Source& from, uint32_t stage, uint32_t place) {
    if (from.hidden != nullptr) {
      copy_whole_rows<kTileColumns>(stage + kHiddenBytes + place, from.classifier + block_ * kRowBytes,
                                    params.product.classifier_stride);
    } else if (tile_ < shared.tiles()) {
      copy_part(shared, params, stage);
    }
    ptx::copy_async_commit();
    if (++block_ < params.depth_blocks) return;
    block_ = 0;
    ++tile_;
    find_pointers(shared, params);
  }
  template <class Args>
  __device__ __forceinline__ void copy_both(const SharedMemory& shared, const MmaParams<Args>& params,
                                            uint32_t stage, uint32_t place) {
    const Source from = source(shared, params);
    copy_hidden(params, from, stage, place);
    copy_classifier(shared, params, from, stage, place);
  }

 private:
  template <class Args>
  __device__ __forceinline__ void copy_part(const SharedMemory& shared, const MmaParams<Args>& params,
                                            uint32_t stage) const {
    const LogitsProduct& product = params.product;
    const int4 origin = shared.load_origin(tile_);
    const int first = block_ * kBlockDepth, depth = static_cast<int>(product.depth);
    copy_rows<kBlockRows>(stage, product.hidden, product.hidden_stride, origin.x,
                          static_cast<int>(product.rows), first, depth);
    copy_rows<kTileColumns>(stage + kHiddenBytes, product.classifier, product.classifier_stride, origin.y,
                            static_cast<int>(product.columns), first, depth);
  }

  template <class Args>
  __device__ __forceinline__ void find_pointers(const SharedMemory& shared,
                                                const MmaParams<Args>& params) const {
    const LogitsProduct& product = params.product;
    const char *hidden = nullptr, *classifier = nullptr;
    if (tile_ < shared.tiles()) {
      const int4 origin = shared.load_origin(tile_);
      if (origin.x + kBlockRows <= product.rows && origin.y + kTileColumns <= product.columns) {
        const int row = ptx::thread_index() >> 2, element = (ptx::thread_index() & 3) * 8;
        hidden = static_cast<const char*>(product.hidden) +
                 2 * ((origin.x + row) * product.hidden_stride + element);
        classifier = static_cast<const char*>(product.classifier) +
                     2 * ((origin.y + row) * product.classifier_stride + element);
      }
    }
    ptx::store_shared(shared.pointers(), hidden, classifier);
  }

  int tile_;
  int block_;  // of depth
};

}  // namespace headroom::cuda::mma
