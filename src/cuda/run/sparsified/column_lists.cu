#include <cub/device/device_scan.cuh>

#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/sparsified.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

constexpr int kRowThreads = 64, kAtOnce = 4;  // elements of a thread whose loads do not wait for one another

// A sum of counts, at most `most`: if a caller's lse is far too low, more is kept than there is room for.
struct BoundedSum {
  int64_t most;
  __device__ int32_t operator()(int32_t a, int32_t b) const {
    return static_cast<int32_t>(min(int64_t{a} + b, most));
  }
};

// One block for each row. A column's counts go down to 0, and its elements fill its list from the end to the
// start.
__global__ void __launch_bounds__(kRowThreads) scatter_kernel(SparsifiedArena t) {
  const int64_t row = blockIdx.x;
  const int count = t.kept_count[row];
  const Kept* kept = t.kept + row * t.sizes.capacity;
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kRowThreads * kAtOnce) {
    const int here = min(kAtOnce, (count - first + kRowThreads - 1) / kRowThreads);
    Kept element[kAtOnce];
    int64_t at[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) element[e] = e < here ? kept[first + e * kRowThreads] : Kept{};
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      at[e] = t.sizes.kept;
      if (e >= here) continue;
      const int32_t column = element[e].column;
      at[e] = int64_t{t.column_start[column]} + atomicSub(t.column_count + column, 1) - 1;
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      if (at[e] < t.sizes.kept) t.by_column[at[e]] = {static_cast<int32_t>(row), element[e].value};
    }
  }
}

}  // namespace

void launch_column_lists(const SparsifiedArena& t, const Queue& queue) {
  queue.call([t](cudaStream_t stream) {
    size_t bytes = t.scan_bytes;
    check(cub::DeviceScan::ExclusiveScan(t.scan, bytes, t.column_count, t.column_start,
                                         BoundedSum{t.sizes.kept}, 0, t.vocab + 1, stream),
          "starts of columns' lists");
  });
  if (t.rows == 0) return;
  queue.launch("column_lists", scatter_kernel, static_cast<unsigned>(t.rows), kRowThreads, 0, t);
}

}  // namespace logitless::cuda
