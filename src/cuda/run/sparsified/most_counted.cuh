#pragma once
// Finds the columns with the highest counts, by a histogram of the counts. For kernels of kCountThreads
// threads whose blocks wait for one another.
#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "cuda/run/sparsified/sparsified.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

inline constexpr int kCountThreads = kCountBins;

// Maps a count to one of kCountBins bins: one for each count, or for 2^shift of them. Higher counts are in
// the last bin.
struct CountBins {
  int shift = 0;

  // Returns bins for counts of at most `most`.
  static CountBins up_to(int64_t most) {
    CountBins bins;
    while (most >> bins.shift >= kCountBins) ++bins.shift;
    return bins;
  }
  __device__ int operator()(int32_t count) const { return min(count >> shift, kCountBins - 1); }
};

// Threads of the whole grid.
__device__ inline int64_t grid_thread() {
  return int64_t{blockIdx.x} * kCountThreads + threadIdx.x;
}
__device__ inline int64_t grid_threads() {
  return int64_t{gridDim.x} * kCountThreads;
}

// Adds up in bins, which are 0, how many columns have each count above `least`.
__device__ inline void count_bins(const int32_t* count, int64_t vocab, int32_t least, CountBins bin_of,
                                  int32_t* bins) {
  for (int64_t j = grid_thread(); j < vocab; j += grid_threads()) {
    if (count[j] > least) atomicAdd(bins + bin_of(count[j]), 1);
  }
}

// Returns the highest bin whose columns are not all among the `room` most counted, at least bin 0. Called by
// each block.
__device__ inline int find_cutoff(const int32_t* bins, int64_t room) {
  using Scan = cub::BlockScan<int32_t, kCountThreads>;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ int fit;  // bins that fit, from the highest on
  const int thread = static_cast<int>(threadIdx.x);
  int32_t above = 0;  // including the thread's own bin
  Scan(scratch).InclusiveSum(bins[kCountBins - 1 - thread], above);
  if (thread == 0) fit = 0;
  __syncthreads();
  if (above <= room) atomicMax(&fit, thread + 1);
  __syncthreads();
  return max(kCountBins - 1 - fit, 0);
}

// Launches such a kernel. All blocks are on the device at a time: at most one on each multiprocessor.
template <class... Arguments>
void launch_counting(void (*kernel)(Arguments...), const Queue& queue, const char* what,
                     Arguments... arguments) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const int blocks = std::min(query_device(device).processors, kMostCountBlocks);
  void* pointers[] = {&arguments...};
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(kCountThreads);
  launch.attrs = &cooperative;
  launch.numAttrs = 1;
  queue.launch(what, launch, kernel_pointer(kernel), pointers);
}

}  // namespace logitless::cuda
