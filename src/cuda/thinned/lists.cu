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

__global__ void end_kernel(const int32_t* column_count, int64_t vocab, int32_t* column_start) {
  column_start[vocab] = column_start[vocab - 1] + column_count[vocab - 1];
}

}  // namespace

void launch_column_lists(const ColumnLists& c, cudaStream_t stream) {
  size_t bytes = c.scan_bytes;
  check(cub::DeviceScan::ExclusiveSum(c.scan, bytes, c.column_count, c.column_start, c.vocab, stream),
        "starts of columns' lists");
  end_kernel<<<1, 1, 0, stream>>>(c.column_count, c.vocab, c.column_start);
  if (c.rows > 0) scatter_kernel<<<static_cast<unsigned>(c.rows), kThreads, 0, stream>>>(c);
  check_launch("column_lists");
}

}  // namespace headroom::cuda
