#pragma once
#include <cstdint>

// Copies from global to shared memory that a thread starts and waits for later.
namespace logitless::cuda::mma::ptx {

// Copies 16 bytes past L1, both addresses aligned to 16. The first `bytes` are read, the others become 0.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Copies all of the 16 bytes.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Makes a group of the thread's copies since the previous group.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of the thread's last groups are unfinished. Other threads see the copied data
// after a barrier.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace logitless::cuda::mma::ptx
