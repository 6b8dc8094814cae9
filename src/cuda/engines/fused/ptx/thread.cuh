#pragma once

namespace logitless::cuda::fused::ptx {

// The thread's index, read anew at each use. Kept, it and the values derived from it would occupy registers.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// True, unknown to the compiler: `if (always())` ends a stretch of code within which it reorders
// instructions, and so bounds how many intermediate results are alive at once.
__device__ __forceinline__ bool always() {
  int one;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  asm volatile("mov.u32 %0, %%nctaid.y;" : "=r"(one));
#else
  asm volatile("mov.u32 %0, %%nclusterid.y;" : "=r"(one));
#endif
  return one == 1;
}

// Makes the compiler regard its arguments as changed. Otherwise it would keep values that it computed from
// them.
__device__ __forceinline__ void forget(float& a, float& b) {
  asm volatile("" : "+f"(a), "+f"(b));
}
__device__ __forceinline__ void forget(float& a) {
  asm volatile("" : "+f"(a));
}

// Synchronizes this many threads of a block, in whole warps.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace logitless::cuda::fused::ptx
