#include "cuda/plan/sizes.h"
#include "cuda/run/float64/kernels.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda::float64 {
namespace {

// A block of threads makes a tile of the result, each thread every kSide-th of its rows and columns.
constexpr int kTile = 64, kDepth = 16, kSide = 16, kThreads = kSide * kSide, kEach = kTile / kSide;

using SharedTile = double[kDepth][kTile + 1];

// scale * x of kTile rows from `first` and kDepth terms from `k`, 0 outside. Neighbouring threads load
// neighbouring elements.
__device__ void load_tile(SharedTile& tile, const Factor& x, int64_t first, int64_t rows, int64_t k,
                          const Product& p, double scale) {
  const bool along_k = x.k_stride == 1;
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kDepth; at += kThreads) {
    const int i = along_k ? at / kDepth : at % kTile, l = along_k ? at % kDepth : at / kTile;
    const bool given =
        first + i < rows && k + l < p.k && (p.k_target == nullptr || p.k_target[k + l] != kIgnoredRow);
    tile[l][i] = given ? scale * x.data[(first + i) * x.stride + (k + l) * x.k_stride] : 0;
  }
}

__global__ void __launch_bounds__(kThreads) product_kernel(Product p) {
  __shared__ SharedTile a, b;
  const int64_t row = int64_t{blockIdx.y} * kTile, column = int64_t{blockIdx.x} * kTile;
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  double sums[kEach][kEach];
  // Calls body(sum, its place) for this thread's part of the result.
  const auto for_each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t r = row + y + i * kSide, s = column + x + j * kSide;
        body(sums[i][j], r < p.m && s < p.n ? p.c + r * p.c_stride + s : nullptr);
      }
    }
  };
  for_each([&](double& sum, const double* at) { sum = p.adds && at != nullptr ? *at : 0; });
  for (int64_t k = 0; k < p.k; k += kDepth) {
    load_tile(a, p.a, row, p.m, k, p, p.scale);
    load_tile(b, p.b, column, p.n, k, p, 1);
    __syncthreads();
    for (int l = 0; l < kDepth; ++l) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          sums[i][j] = fma(a[l][y + i * kSide], b[l][x + j * kSide], sums[i][j]);
        }
      }
    }
    __syncthreads();
  }
  for_each([&](double sum, double* at) {
    if (at != nullptr) *at = sum;
  });
}

}  // namespace

void launch_product(const Product& p, cudaStream_t stream) {
  const dim3 tiles(static_cast<unsigned>(ceil_div(p.n, kTile)), static_cast<unsigned>(ceil_div(p.m, kTile)));
  Queue(stream).launch(product_kernel, tiles, kThreads, 0, p);
  check_launch("float64 product");
}

}  // namespace logitless::cuda::float64
