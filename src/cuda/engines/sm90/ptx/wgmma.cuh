#pragma once
#include <cstdint>

#include "core/dtype.h"

// Warpgroup matrix multiply: D[64, 192] (+)= A[64, 16] B[192, 16]^T, both from shared memory, fp32
// accumulators.
//
// Both operands lie in shared memory as rows of 64 elements (128 bytes) in the copy engine's 128-byte
// swizzle, eight rows (1024 bytes) an atom. Thread t of the warpgroup holds of D, for j in 0..23, the
// elements
//   d[4j + 0..1]: row 16 (t / 32) + (t % 32) / 4,      columns 8j + 2 (t % 4) + 0..1
//   d[4j + 2..3]: eight rows further down
namespace logitless::cuda::sm90::ptx {

// The lower half of a matrix descriptor: the address in units of 16 bytes, of which additions may be made.
// The next 16 elements of depth are 2 units on, the next 64 rows 512 units.
__device__ __forceinline__ uint32_t matrix_offset(uint32_t address) {
  return (address & 0x3FFFF) >> 4 | 1u << 16;
}

// With the upper half: 1024 bytes from one eight-row atom to the next, 128-byte swizzle.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t offset) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | offset;
}

// Before the first wgmma and whenever registers of the accumulators were written by other instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define LOGITLESS_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LOGITLESS_D16(i) LOGITLESS_D4(i), LOGITLESS_D4(i + 4), LOGITLESS_D4(i + 8), LOGITLESS_D4(i + 12)
#define LOGITLESS_WGMMA_N192(type)                                                                    \
  asm volatile(                                                                                       \
      "{\n"                                                                                           \
      ".reg .pred accumulate;\n"                                                                      \
      "setp.ne.b32 accumulate, %98, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                                    \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "              \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "              \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "              \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "             \
      "%96, %97, accumulate, 1, 1, 0, 0;\n"                                                           \
      "}\n"                                                                                           \
      : LOGITLESS_D16(0), LOGITLESS_D16(16), LOGITLESS_D16(32), LOGITLESS_D16(48), LOGITLESS_D16(64), \
        LOGITLESS_D16(80)                                                                             \
      : "l"(a), "l"(b), "r"(accumulate))

// a, b: matrix_descriptor()s. accumulate 0: d is overwritten.
template <DType kType>
__device__ __forceinline__ void wgmma_n192(float (&d)[96], uint64_t a, uint64_t b, int accumulate) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16) {
    LOGITLESS_WGMMA_N192("bf16");
  } else {
    LOGITLESS_WGMMA_N192("f16");
  }
}

#undef LOGITLESS_WGMMA_N192
#undef LOGITLESS_D16
#undef LOGITLESS_D4

}  // namespace logitless::cuda::sm90::ptx
