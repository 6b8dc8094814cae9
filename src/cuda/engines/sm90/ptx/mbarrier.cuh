#pragma once
#include <cstdint>

// Transaction barriers in shared memory. Addresses are 32-bit shared-memory addresses (shared_address()).
namespace logitless::cuda::sm90::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the other block of the cluster and to the copy engine; follow
// with a cluster barrier.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that also announces `bytes` of copies still to land.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of block `rank` of the cluster. Unqualified on purpose: the .release.cluster
// form compiles to MEMBAR.ALL.GPU, once a stage, and makes the main loop 1.55 to 1.75 times slower. What it
// guards are reads by wgmma, complete before the arrival; no ordinary store has to become visible.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity has completed. A fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace logitless::cuda::sm90::ptx
