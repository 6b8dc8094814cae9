#pragma once
#include <cstdint>

#include "core/dtype.h"

// The tensor cores' instruction for compute capability 8.0 and newer, executed by a whole warp: D[16, 8] +=
// A[16, 16] B[16, 8], 16-bit operands, fp32 sums. With g = lane / 4 and q = lane % 4 a lane holds, two
// elements in each 32-bit register, the first in the lower half (PTX ISA, "Matrix Fragments for mma.m16n8k16
// with floating point type"):
//   a[0]: A[g][2q, 2q + 1]          b[0]: B[2q, 2q + 1][g]
//   a[1]: A[g + 8][2q, 2q + 1]      b[1]: B[2q + 8, 2q + 9][g]
//   a[2]: A[g][2q + 8, 2q + 9]      d[0], d[1]: D[g][2q, 2q + 1]
//   a[3]: A[g + 8][2q + 8, 2q + 9]  d[2], d[3]: D[g + 8][2q, 2q + 1]
namespace logitless::cuda::mma::ptx {

template <DType kType>
__device__ __forceinline__ void multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace logitless::cuda::mma::ptx
