#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {
namespace {

template <class From, class To>
__global__ void scatter_dense_kernel(ScatterDense s) {
  const int32_t column = s.column[blockIdx.x];
  if (column < 0) return;
  const auto* from = s.from.row<From>(blockIdx.x);
  auto* to = s.to.row<To>(column);
  for (int64_t i = threadIdx.x; i < s.columns; i += blockDim.x) {
    const float old = s.accumulate ? to_float(to[i]) : 0.0f;
    float value = to_float(from[i]);
    if (s.smoothing.sum != nullptr) {
      const float* factor = s.smoothing.row_factor;
      value = fmaf(factor != nullptr ? factor[column] : 1.0f, s.smoothing.sum[i], value);
    }
    to[i] = from_float<To>(old + value);
  }
}

}  // namespace

void launch_scatter_dense(const ScatterDense& s, const Queue& queue) {
  for_dtype(s.from.dtype, [&](auto from) {
    for_dtype(s.to.dtype, [&](auto to) {
      queue.launch("scatter_dense", scatter_dense_kernel<decltype(from), decltype(to)>,
                   static_cast<unsigned>(s.count), 256, 0, s);
    });
  });
}

}  // namespace logitless::cuda
