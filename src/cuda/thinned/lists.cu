#include <cub/device/device_scan.cuh>

#include "cuda/check.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/thinned/thinned.h"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;

// One block a row. Leaves the counts 0.
__global__ void scatter_kernel(ColumnLists c) {
  const int64_t row = blockIdx.x;
  const int count = c.kept_count[row];
  const Kept* kept = c.kept + row * c.capacity;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const Kept element = kept[i];
    const int64_t at = c.column_start[element.column] + atomicSub(c.column_count + element.column, 1) - 1;
    if (at < c.most) c.by_column[at] = {static_cast<int32_t>(row), element.value};
  }
}

// One thread.
__global__ void end_kernel(ColumnLists c) {
  const int64_t end = int64_t{c.column_start[c.vocab - 1]} + c.column_count[c.vocab - 1];
  c.column_start[c.vocab] = static_cast<int32_t>(min(end, c.most));
}

// Bounds the starts: with an lse of the caller's that is far too low, more is kept than there is room for.
__global__ void bound_kernel(ColumnLists c) {
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j < c.vocab && c.column_start[j] > c.most) c.column_start[j] = static_cast<int32_t>(c.most);
}

}  // namespace

void launch_column_lists(const ColumnLists& c, cudaStream_t stream) {
  size_t bytes = c.scan_bytes;
  check(cub::DeviceScan::ExclusiveSum(c.scan, bytes, c.column_count, c.column_start, c.vocab, stream),
        "starts of columns' lists");
  end_kernel<<<1, 1, 0, stream>>>(c);
  bound_kernel<<<blocks_for(c.vocab, kThreads), kThreads, 0, stream>>>(c);
  if (c.rows > 0) scatter_kernel<<<static_cast<unsigned>(c.rows), kThreads, 0, stream>>>(c);
  check_launch("column_lists");
}

}  // namespace headroom::cuda
