#pragma once
#include <cstdint>

// Copies from global to shared memory that a thread starts and waits for later.
namespace logitless::cuda::mma::ptx {

// 16 bytes, both aligned to them, of which the first `bytes` are read and the others are 0; past L1.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// All of the 16 bytes.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Makes a group of the thread's copies since the group before.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most kPending of the thread's last groups are not done. Other threads see what was copied after a
// barrier.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace logitless::cuda::mma::ptx
