#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>

#include "cuda/runtime/matrix.h"

namespace logitless::cuda {

class Queue;

// C [m, n] = alpha op(A) op(B) + beta C, all row-major, op(A) [m, k], op(B) [k, n], sums in fp32, of
// float64 operands in float64.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  ConstMatrix a;  // [m, k], or [k, m] when transposed
  bool transpose_a = false;
  ConstMatrix b;  // of A's dtype; [k, n], or [n, k] when transposed
  bool transpose_b = false;
  bool allow_tf32 = false;  // fp32 operands may be rounded to it
  Matrix c;                 // fp32 or of the operands' dtype; float64 of float64 operands
  float beta = 0;           // 0 or 1
  // Device scalars: alpha (null: 1), and then also where a 0 and a 1 lie, as cuBLASLt wants beta beside
  // alpha. Not with float64 operands.
  const float* alpha = nullptr;
  const float* zero_one = nullptr;

  auto operator<=>(const Gemm&) const = default;
};

// Scratch that cuBLASLt may use for split-K sums.
inline constexpr size_t kGemmScratchBytes = size_t{32} << 20;

// Queues the product. The choice of algorithm is remembered for every shape and device; it never depends on
// timing, and partial sums are joined in a fixed order, so the same call gives the same bits. Of A any extent
// may be odd: what is left over 16 bytes is a product of its own. Of B and C [m, n], n should be whole 16
// bytes, or the product is slow.
void gemm(const Gemm& g, void* scratch, size_t scratch_bytes, const Queue& queue);

}  // namespace logitless::cuda
