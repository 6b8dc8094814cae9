#include <algorithm>

#include "cuda/rows/device_rows.cuh"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

constexpr int kTile = 64;  // rows and columns of C in a block
constexpr int kSlab = 16;  // terms that are in shared memory at once
constexpr int kSide = 16;  // threads along each side of the tile, with 4 x 4 elements each
constexpr int kThreads = kSide * kSide, kOwn = kTile / kSide;

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
__global__ void __launch_bounds__(kThreads) dot_products_kernel(Gemm g) {
  using Real = RealOf<T>;
  __shared__ Real a[kSlab][kTile + 1], b[kSlab][kTile + 1];
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const int64_t first_column = int64_t{blockIdx.x} * kTile;
  for (int64_t first_row = int64_t{blockIdx.y} * kTile; first_row < g.m;
       first_row += int64_t{gridDim.y} * kTile) {
    Real sums[kOwn][kOwn] = {};
    for (int64_t start = 0; start < g.k; start += kSlab) {
      load_slab<T>(a, g.a, first_row, g.m, start, g.k);
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
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const int64_t row = first_row + y + i * kSide, column = first_column + x + j * kSide;
        if (row < g.m && column < g.n) g.c.row<Real>(row)[column] = sums[i][j];
      }
    }
  }
}

}  // namespace

void launch_dot_products(const Gemm& g, const Queue& queue) {
  constexpr int64_t kMostInY = 65535;
  const dim3 blocks(static_cast<unsigned>((g.n + kTile - 1) / kTile),
                    static_cast<unsigned>(std::min((g.m + kTile - 1) / kTile, kMostInY)));
  for_any_dtype(g.a.dtype, [&](auto type) {
    queue.launch("dot_products", dot_products_kernel<decltype(type)>, blocks, kThreads, 0, g);
  });
}

}  // namespace logitless::cuda
