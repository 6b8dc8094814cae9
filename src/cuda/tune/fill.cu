#include <algorithm>
#include <cmath>

#include "cuda/rows/device_rows.cuh"
#include "cuda/runtime/queue.h"
#include "cuda/tune/device_work.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

__device__ uint32_t hashed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// A sum of four uniform numbers is close to normal; its variance is 4 / 12.
template <class T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* data, int64_t count, float unit, uint32_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const uint32_t bits = hashed(static_cast<uint32_t>(i) ^ hashed(seed + static_cast<uint32_t>(i >> 32)));
    const uint32_t more = hashed(bits);
    const uint32_t sum = (bits & 0xFFFFu) + (bits >> 16) + (more & 0xFFFFu) + (more >> 16);
    data[i] = from_float<T>((static_cast<float>(sum) / 65536.0f - 2.0f) * unit);
  }
}

__global__ void __launch_bounds__(kThreads)
    fill_targets_kernel(int32_t* targets, int64_t count, int64_t columns) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) targets[i] = static_cast<int32_t>(hashed(static_cast<uint32_t>(i)) % columns);
}

}  // namespace

void launch_fill(void* data, DType dtype, int64_t count, double deviation, uint32_t seed,
                 cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 4096;
  const auto blocks = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    Queue(stream).launch("fill", fill_kernel<T>, blocks, kThreads, 0, static_cast<T*>(data), count,
                         static_cast<float>(deviation * std::sqrt(3.0)), seed);
  });
}

void launch_fill_targets(int32_t* targets, int64_t count, int64_t columns, cudaStream_t stream) {
  Queue(stream).launch("fill_targets", fill_targets_kernel,
                       static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, targets, count,
                       columns);
}

}  // namespace logitless::cuda
