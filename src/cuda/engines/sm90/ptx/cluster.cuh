#pragma once
#include <cstdint>

// Thread-block clusters, and arrivals at the named barriers of one block.
namespace logitless::cuda::sm90::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ int cluster_index() {
  int index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// Every thread of the cluster; all lanes of a warp together.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same where the lanes of a warp may come apart.
__device__ __forceinline__ void cluster_sync_diverged() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace logitless::cuda::sm90::ptx
