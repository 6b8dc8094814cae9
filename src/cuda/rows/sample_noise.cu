// The noise of lists of ids: logitless_sample_noise_run.
#include <algorithm>

#include "core/sampling.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/rows.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kMostBlocks = 1 << 16;

__global__ void __launch_bounds__(kThreads) noise_kernel(const __grid_constant__ NoiseLists lists) {
  const int64_t count = lists.rows * lists.columns, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) lists.make(i);
}

}  // namespace

void launch_noise(const NoiseLists& lists, const Queue& queue) {
  const unsigned blocks = std::min(blocks_for(lists.rows * lists.columns, kThreads), kMostBlocks);
  queue.launch("noise", noise_kernel, blocks, kThreads, 0, lists);
}

}  // namespace logitless::cuda
