#pragma once

namespace logitless::cuda::fused::ptx {

// The thread's index, read anew where it is used: kept in registers it and what follows from it would be in
// the way.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// True, which the compiler does not know: `if (always())` ends a stretch of code within which it reorders
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

// Not the values that they were to the compiler, which would else keep what it has made of those.
__device__ __forceinline__ void forget(float& a, float& b) {
  asm volatile("" : "+f"(a), "+f"(b));
}

// Of so many threads of a block, whole warps.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace logitless::cuda::fused::ptx
