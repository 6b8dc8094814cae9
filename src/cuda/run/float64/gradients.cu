#include "cuda/rows/device_rows.cuh"
#include "cuda/run/float64/kernels.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda::float64 {
namespace {

constexpr int kThreads = 256;

__global__ void column_sums_kernel(Block dz, double* sums) {
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= dz.columns) return;
  double sum = sums[j];
  for (int64_t r = 0; r < dz.rows; ++r) sum += dz.data[r * dz.stride + j];
  sums[j] = sum;
}

// One block a row.
__global__ void store_rows_kernel(StoreRows s) {
  const int64_t r = blockIdx.x;
  const bool ignored = s.target != nullptr && s.target[r] == kIgnoredRow;
  double* to = s.to + r * s.stride;
  for (int64_t i = threadIdx.x; i < s.columns; i += kThreads) {
    const double sum = ignored ? 0 : s.factor * s.from[r * s.columns + i];
    to[i] = s.accumulate ? to[i] + sum : sum;
  }
}

}  // namespace

void launch_column_sums(const Block& dz, double* sums, cudaStream_t stream) {
  Queue(stream).launch(column_sums_kernel, blocks_for(dz.columns, kThreads), kThreads, 0, dz, sums);
  check_launch("float64 column_sums");
}

void launch_store_rows(const StoreRows& s, cudaStream_t stream) {
  Queue(stream).launch(store_rows_kernel, static_cast<unsigned>(s.rows), kThreads, 0, s);
  check_launch("float64 store_rows");
}

}  // namespace logitless::cuda::float64
