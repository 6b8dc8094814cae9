#pragma once
#include <cuda.h>

#include <cstdint>

// Tensor copies by the copy engine between global memory and 128-byte-swizzled shared memory. x is the
// element within a row, y the row. Elements outside the tensor read as zero, count as bytes that landed, and
// are not written.
namespace logitless::cuda::sm90::ptx {

__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, uint32_t barrier,
                                         int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// The same box into every block of the cluster named in `mask`, at the same shared-memory offset, signalling
// each block's own barrier.
__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const CUtensorMap* map,
                                                   uint32_t barrier, int x, int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(source), "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most kPending of this thread's committed stores still read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Ordinary stores to shared memory before it are seen by copies issued after it (with a barrier between
// them).
__device__ __forceinline__ void fence_shared_to_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace logitless::cuda::sm90::ptx
