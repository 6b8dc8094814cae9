#pragma once
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {

// Appends the elements with `keep` to `out`, in order, and returns the new count. Called by a whole block of
// kThreads, with one element for each thread. Memory that a thread read before the call may be overwritten.
template <int kThreads, class T>
__device__ int append(T* out, int count, bool keep, const T& element) {
  __shared__ int warps[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned ballot = __ballot_sync(~0u, keep);
  if (lane == 0) warps[warp] = __popc(ballot);
  __syncthreads();
  int before = count, all = count;
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += warps[i];
    all += warps[i];
  }
  if (keep) out[before + __popc(ballot & ((1u << lane) - 1))] = element;
  __syncthreads();
  return all;
}

}  // namespace logitless::cuda
