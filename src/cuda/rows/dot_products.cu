#include <mma.h>

#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/rows/vector8.cuh"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// Returns the end of the product's rows that exist, apart from blocks that are not active; it may be below 0.
__device__ int64_t end_of_rows(const ExistingRows& rows, int64_t m) {
  return rows.count == nullptr ? m : min(m, *rows.count - rows.first);
}
__device__ bool is_active(const ExistingRows& rows, int64_t row) {
  return rows.block_active == nullptr || rows.block_active[(rows.first + row) / kRowBlock] != 0;
}
// Whether a tile of the product has an active row. Its rows are in at most two blocks of rows.
template <int kTileRows>
__device__ bool has_active_row(const ExistingRows& rows, int64_t first, int64_t end) {
  static_assert(kTileRows <= kRowBlock);
  return is_active(rows, first) || is_active(rows, min(first + kTileRows, end) - 1);
}

// ---- Plain dot products

constexpr int kTile = 64;  // rows and columns of C in a block
constexpr int kSlab = 16;  // terms that are in shared memory at once
constexpr int kSide = 16;  // threads along each side of the tile, with 4 x 4 elements each
constexpr int kOwn = kTile / kSide;
static_assert(kSide * kSide == kThreads);

// Loads rows [first, first + kTile) of the slab; 0 past the ends of the matrix.
template <class T>
__device__ void load_slab(RealOf<T> (&slab)[kSlab][kTile + 1], const ConstMatrix& matrix, int64_t first,
                          int64_t rows, int64_t start, int64_t k) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kSlab; i += kThreads) {
    const int row = i / kSlab, term = i % kSlab;
    const bool exists = first + row < rows && start + term < k;
    slab[term][row] = exists ? to_real(matrix.row<T>(first + row)[start + term]) : RealOf<T>(0);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) dot_products_kernel(Gemm g, ExistingRows rows) {
  using Real = RealOf<T>;
  __shared__ Real a[kSlab][kTile + 1], b[kSlab][kTile + 1];
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const int64_t first_column = int64_t{blockIdx.x} * kTile, end = end_of_rows(rows, g.m);
  for (int64_t first_row = int64_t{blockIdx.y} * kTile; first_row < end;
       first_row += int64_t{gridDim.y} * kTile) {
    if (!has_active_row<kTile>(rows, first_row, end)) continue;
    Real sums[kOwn][kOwn] = {};
    for (int64_t start = 0; start < g.k; start += kSlab) {
      load_slab<T>(a, g.a, first_row, end, start, g.k);
      load_slab<T>(b, g.b, first_column, g.n, start, g.k);
      __syncthreads();
#pragma unroll
      for (int term = 0; term < kSlab; ++term) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int j = 0; j < kOwn; ++j) {
            sums[i][j] = std::fma(a[term][y + i * kSide], b[term][x + j * kSide], sums[i][j]);
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int64_t row = first_row + y + i * kSide;
      if (row >= end || !is_active(rows, row)) continue;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const int64_t column = first_column + x + j * kSide;
        if (column < g.n) g.c.row<Real>(row)[column] = sums[i][j];
      }
    }
  }
}

// ---- 16-bit operands, by tensor cores

namespace wmma = nvcuda::wmma;

constexpr int kPart = 16;       // a warp multiplies parts of 16 x 16 elements
constexpr int kWideTile = 128;  // rows and columns of C in a block
constexpr int kWarpRows = 64, kWarpColumns = 32;
constexpr int kWarpsInRow = kWideTile / kWarpColumns;
static_assert(kWideTile / kWarpRows * kWarpsInRow * 32 == kThreads);
constexpr int kWideSlab = 32;  // terms that are in shared memory at once
// Elements from row to row of a slab, so that the same terms of 8 rows are in different banks.
constexpr int kSlabStride = kWideSlab + 8;
constexpr int kPiecesOfRow = kWideSlab / 8, kPieces = kWideTile * kPiecesOfRow / kThreads;
constexpr int kSumStride = kPart + 4;  // from row to row of a part of C in shared memory

template <class T>
using WideSlab = T[kWideTile][kSlabStride];

// A thread's pieces of 8 terms of a matrix's slabs, on their way to shared memory. kAligned: as for load8().
template <bool kAligned, class T>
class SlabPieces {
 public:
  // Rows [first, first + kWideTile). Past the ends of the matrix, elements are 0.
  __device__ __forceinline__ SlabPieces(const ConstMatrix& matrix, int64_t first, int64_t rows, int64_t k)
      : next_(matrix.row<T>(first + row()) + term()),
        step_(kRowsAtOnce * matrix.stride),
        rows_left_(static_cast<int>(min(rows - first, int64_t{kWideTile})) - row()),
        terms_left_(k - term()) {}

  __device__ __forceinline__ void load_next() {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool exists = i * kRowsAtOnce < rows_left_ && terms_left_ > 0;
      const int left = static_cast<int>(min(terms_left_, int64_t{8}));
      piece_[i] = exists ? load8<kAligned>(next_ + i * step_, left) : Vector8<T>{};
    }
    next_ += kWideSlab;
    terms_left_ -= kWideSlab;
  }
  __device__ __forceinline__ void store(WideSlab<T>& slab) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      *reinterpret_cast<Vector8<T>*>(&slab[row() + i * kRowsAtOnce][term()]) = piece_[i];
    }
  }

 private:
  static constexpr int kRowsAtOnce = kThreads / kPiecesOfRow;
  // The thread's first row of the slab, and its first term.
  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kPiecesOfRow; }
  static __device__ __forceinline__ int term() { return static_cast<int>(threadIdx.x) % kPiecesOfRow * 8; }

  Vector8<T> piece_[kPieces];
  const T* next_;
  int64_t step_;
  int rows_left_;
  int64_t terms_left_;
};

// The sums of a warp's part of a tile.
struct WarpSums {
  static constexpr int kDown = kWarpRows / kPart, kAcross = kWarpColumns / kPart;
  wmma::fragment<wmma::accumulator, kPart, kPart, kPart, float> of[kDown][kAcross];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) wmma::fill_fragment(of[i][j], 0.0f);
    }
  }

  // Adds the products of a slab's terms. row, column: the warp's first ones in the tile.
  template <class T>
  __device__ __forceinline__ void add(const WideSlab<T>& a, const WideSlab<T>& b, int row, int column) {
#pragma unroll
    for (int term = 0; term < kWideSlab; term += kPart) {
      wmma::fragment<wmma::matrix_b, kPart, kPart, kPart, T, wmma::col_major> right[kAcross];
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        wmma::load_matrix_sync(right[j], &b[column + j * kPart][term], kSlabStride);
      }
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
        wmma::fragment<wmma::matrix_a, kPart, kPart, kPart, T, wmma::row_major> left;
        wmma::load_matrix_sync(left, &a[row + i * kPart][term], kSlabStride);
#pragma unroll
        for (int j = 0; j < kAcross; ++j) wmma::mma_sync(of[i][j], left, right[j], of[i][j]);
      }
    }
  }

  // Calls store(row, column, sum) for each sum, counted from the warp's first row and column. staged: shared
  // memory of the warp, [kPart, kSumStride].
  template <class Store>
  __device__ __forceinline__ void for_each(float* staged, const Store& store) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % kPart;
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        wmma::store_matrix_sync(staged, of[i][j], kSumStride, wmma::mem_row_major);
        __syncwarp();
#pragma unroll
        for (int row = lane / kPart; row < kPart; row += 32 / kPart) {
          store(i * kPart + row, j * kPart + column, staged[row * kSumStride + column]);
        }
        __syncwarp();
      }
    }
  }
};

// Tensor cores sum the terms of an element in the same way wherever it is in a tile.
template <bool kAligned, class T>
__global__ void __launch_bounds__(kThreads, kAligned ? 2 : 1)
    tensor_products_kernel(Gemm g, ExistingRows rows) {
  // Two slabs each: one is multiplied while the next is loaded.
  __shared__ __align__(32) WideSlab<T> a[2], b[2];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / kWarpsInRow * kWarpRows, warp_column = warp % kWarpsInRow * kWarpColumns;
  static_assert(kThreads / 32 * kPart * kSumStride * sizeof(float) <= sizeof(a));
  float* staged = reinterpret_cast<float*>(&a) + warp * kPart * kSumStride;
  const int64_t first_column = int64_t{blockIdx.x} * kWideTile, end = end_of_rows(rows, g.m);
  const int64_t slabs = ceil_div(g.k, int64_t{kWideSlab});
  for (int64_t first_row = int64_t{blockIdx.y} * kWideTile; first_row < end;
       first_row += int64_t{gridDim.y} * kWideTile) {
    if (!has_active_row<kWideTile>(rows, first_row, end)) continue;
    SlabPieces<kAligned, T> of_a(g.a, first_row, end, g.k), of_b(g.b, first_column, g.n, g.k);
    const auto load_next = [&] {
      of_a.load_next();
      of_b.load_next();
    };
    const auto store = [&](int64_t slab) {
      of_a.store(a[slab % 2]);
      of_b.store(b[slab % 2]);
    };
    WarpSums sums;
    sums.clear();
    load_next();
    __syncthreads();  // sums of the previous tile are no longer in `a`
    store(0);
    __syncthreads();
    for (int64_t slab = 0; slab < slabs; ++slab) {
      if (slab + 1 < slabs) load_next();
      sums.add<T>(a[slab % 2], b[slab % 2], warp_row, warp_column);
      // The slab before this one, which was in its place, has been multiplied by all warps.
      if (slab + 1 < slabs) store(slab + 1);
      __syncthreads();
    }
    sums.for_each(staged, [&](int i, int j, float sum) {
      const int64_t row = first_row + warp_row + i, column = first_column + warp_column + j;
      if (row < end && column < g.n && is_active(rows, row)) g.c.row<float>(row)[column] = sum;
    });
  }
}

dim3 tiles_of(const Gemm& g, int64_t tile) {
  constexpr int64_t kMostInY = 65535;
  return {static_cast<unsigned>(ceil_div(g.n, tile)),
          static_cast<unsigned>(std::min(ceil_div(g.m, tile), kMostInY))};
}

}  // namespace

void launch_dot_products(const Gemm& g, const ExistingRows& rows, const Queue& queue) {
  for_any_dtype(g.a.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      const bool aligned = is_aligned8(g.a, g.k) && is_aligned8(g.b, g.k);
      queue.launch("tensor_products",
                   aligned ? tensor_products_kernel<true, T> : tensor_products_kernel<false, T>,
                   tiles_of(g, kWideTile), kThreads, 0, g, rows);
    } else {
      queue.launch("dot_products", dot_products_kernel<T>, tiles_of(g, kTile), kThreads, 0, g, rows);
    }
  });
}

}  // namespace logitless::cuda
