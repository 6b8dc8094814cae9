#pragma once
// Hopper's own instructions.
#include <cuda.h>

#include <cstdint>

#include "core/dtype.h"
#include "cuda/engines/fused/ptx/math.cuh"
#include "cuda/engines/fused/ptx/thread.cuh"

namespace logitless::cuda::sm90::ptx {

using namespace fused::ptx;

// ---- Thread-block clusters, and arrivals at the named barriers of one block.

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

// Synchronizes every thread of the cluster; all lanes of a warp call it together.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// cluster_sync() for warps whose lanes may have diverged.
__device__ __forceinline__ void cluster_sync_diverged() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Transaction barriers in shared memory. Addresses are 32-bit shared-memory addresses
// (shared_address()).

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
// form compiles to MEMBAR.ALL.GPU, once for each stage, and makes the main loop 1.55 to 1.75 times slower.
// The barrier guards reads by wgmma, which are complete before the arrival; no ordinary store has to become
// visible.
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

// Moves registers between warpgroups: the loader gives, the computing warpgroups take. Executed by all warps
// of a warpgroup; kRegisters is a multiple of 8.

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Lane 0's value, which the compiler then knows to be the same in the whole warp. Called by a whole warp.
__device__ __forceinline__ uint32_t to_uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// ---- Tensor copies by the copy engine between global memory and 128-byte-swizzled shared memory. x is the
// element within a row, y the row. Elements outside the tensor read as zero, count as bytes that landed, and
// are not written.

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

// Loads a box into every block of the cluster named in `mask`, at the same shared-memory offset, signalling
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

// Waits until at most kPending of this thread's committed stores still read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes earlier ordinary stores to shared memory visible to copies issued later (with a barrier between
// them).
__device__ __forceinline__ void fence_shared_to_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements from the warp's accumulator layout to shared memory. Lane l
// gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned).
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- Warpgroup matrix multiply: D[64, 192] (+)= A[64, K] B[192, K]^T, both from shared memory, fp32
// accumulators. K is 16 for elements of 16 bits and 32 for e4m3: 32 bytes.
//
// Both operands lie in shared memory as rows of 128 bytes in the copy engine's 128-byte swizzle, eight rows
// (1024 bytes) in an atom. Thread t of the warpgroup holds of D, for j in 0..23, the elements
//   d[4j + 0..1]: row 16 (t / 32) + (t % 32) / 4,      columns 8j + 2 (t % 4) + 0..1
//   d[4j + 2..3]: eight rows further down

// The lower half of a matrix descriptor: the address in units of 16 bytes, to which offsets may be added. The
// next 32 bytes of depth are 2 units further, the next 64 rows 512 units.
__device__ __forceinline__ uint32_t matrix_offset(uint32_t address) {
  return (address & 0x3FFFF) >> 4 | 1u << 16;
}

// The descriptor with its upper half: 1024 bytes from one eight-row atom to the next, 128-byte swizzle.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t offset) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | offset;
}

// Required before the first wgmma and whenever other instructions wrote registers of the accumulators.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define LOGITLESS_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LOGITLESS_D16(i) LOGITLESS_D4(i), LOGITLESS_D4(i + 4), LOGITLESS_D4(i + 8), LOGITLESS_D4(i + 12)
#define LOGITLESS_WGMMA_N192(form, orders)                                                            \
  asm volatile(                                                                                       \
      "{\n"                                                                                           \
      ".reg .pred accumulate;\n"                                                                      \
      "setp.ne.b32 accumulate, %98, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n192" form                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "              \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "              \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "              \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "             \
      "%96, %97, accumulate, 1, 1" orders                                                             \
      ";\n"                                                                                           \
      "}\n"                                                                                           \
      : LOGITLESS_D16(0), LOGITLESS_D16(16), LOGITLESS_D16(32), LOGITLESS_D16(48), LOGITLESS_D16(64), \
        LOGITLESS_D16(80)                                                                             \
      : "l"(a), "l"(b), "r"(accumulate))

// a, b: matrix_descriptor()s. accumulate 0: d is overwritten. Sums of e4m3 products keep about 14 bits.
template <DType kType>
__device__ __forceinline__ void wgmma_n192(float (&d)[96], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16 || kType == DType::kE4M3);
  if constexpr (kType == DType::kBF16) {
    LOGITLESS_WGMMA_N192("k16.f32.bf16.bf16", ", 0, 0");
  } else if constexpr (kType == DType::kF16) {
    LOGITLESS_WGMMA_N192("k16.f32.f16.f16", ", 0, 0");
  } else {
    LOGITLESS_WGMMA_N192("k32.f32.e4m3.e4m3", "");
  }
}

#undef LOGITLESS_WGMMA_N192
#undef LOGITLESS_D16
#undef LOGITLESS_D4

}  // namespace logitless::cuda::sm90::ptx
