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

// Outputs of the caller for each row, or null.
struct ListOutputs {
  int32_t* kept_count;
  float* draw_variance;
};

// Completes the list of row r with its target and writes what else is known of it. value: the target's part
// of dz. Called by one thread.
__device__ inline void finish_list(const SparsifiedArena& t, const ListOutputs& to, int64_t r, int count,
                                   int32_t target, float value, float variance, float square) {
  const bool dense = target >= 0 && t.role[target] >= 0;
  if (target >= 0 && !dense) {
    t.kept[r * t.sizes.capacity + count++] = {target, value};
    if (t.lists_columns) atomicAdd(t.column_count + target, 1);
  }
  t.kept_count[r] = count;
  if (to.kept_count != nullptr) to.kept_count[r] = count + static_cast<int32_t>(t.sizes.dense);
  if (to.draw_variance == nullptr) return;
  to.draw_variance[r] = variance;
  t.row_threshold[r] = square + (dense ? 0 : value * value);
}

// The list of an ignored row is empty. Called by one thread.
__device__ inline void finish_ignored_list(const SparsifiedArena& t, const ListOutputs& to, int64_t r) {
  t.kept_count[r] = 0;
  if (to.kept_count != nullptr) to.kept_count[r] = 0;
  if (to.draw_variance != nullptr) to.draw_variance[r] = 0;
}

}  // namespace logitless::cuda
