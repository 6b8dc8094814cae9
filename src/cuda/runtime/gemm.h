#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>

#include "cuda/runtime/matrix.h"

namespace logitless::cuda {

class Queue;

// C [m, n] = alpha op(A) op(B) + beta C. All matrices are row-major; op(A) is [m, k], op(B) [k, n]. Sums are
// in fp32, or in float64 for float64 operands.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  ConstMatrix a;  // [m, k], or [k, m] when transposed
  bool transpose_a = false;
  ConstMatrix b;  // of A's dtype; [k, n], or [n, k] when transposed
  bool transpose_b = false;
  bool allow_tf32 = false;  // fp32 operands may be rounded to TF32
  Matrix c;                 // fp32 or the operands' dtype; float64 for float64 operands
  float beta = 0;           // 0 or 1
  // Device scalars. A null alpha means 1. With an alpha, zero_one points to a 0 and a 1, because cuBLASLt
  // wants beta in the same memory as alpha. Not supported with float64 operands.
  const float* alpha = nullptr;
  const float* zero_one = nullptr;

  auto operator<=>(const Gemm&) const = default;
};

// Scratch that cuBLASLt may use for split-K sums.
inline constexpr size_t kGemmScratchBytes = size_t{32} << 20;

// Queues the product. The choice of algorithm is remembered for every shape and device. It never depends on
// timing, and partial sums are joined in a fixed order, so the same call gives the same bits.
//
// A may have any odd extent: the remainder beyond whole pieces of 16 bytes is a separate product. For B and C
// [m, n], n should be whole pieces of 16 bytes, or the product is slow.
void gemm(const Gemm& g, void* scratch, size_t scratch_bytes, const Queue& queue);

}  // namespace logitless::cuda
