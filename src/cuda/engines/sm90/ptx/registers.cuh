#pragma once
#include <cstdint>

#include "cuda/engines/fused/ptx/math.cuh"
#include "cuda/engines/fused/ptx/thread.cuh"

namespace logitless::cuda::sm90::ptx {

using namespace fused::ptx;

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

// The same value, known to the compiler as one for the whole warp: lane 0's. By a whole warp.
__device__ __forceinline__ uint32_t to_uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

}  // namespace logitless::cuda::sm90::ptx
