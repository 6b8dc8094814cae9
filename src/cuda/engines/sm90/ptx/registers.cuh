#pragma once

namespace headroom::cuda::sm90::ptx {

// Moves registers between warpgroups: the loader gives, the computing warpgroups take. Executed by all warps
// of a warpgroup; kRegisters a multiple of 8.

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The thread's index, read anew where it is used: kept in registers it and what follows from it would be in
// the way.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The same value, known to the compiler as one for the whole warp: lane 0's. By a whole warp.
__device__ __forceinline__ uint32_t to_uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// True, which the compiler does not know: `if (always())` ends a stretch of code within which it reorders
// instructions, and so bounds how many intermediate results are alive at once.
__device__ __forceinline__ bool always() {
  int one;
  asm volatile("mov.u32 %0, %%nclusterid.y;" : "=r"(one));
  return one == 1;
}

}  // namespace headroom::cuda::sm90::ptx
