#pragma once
#include <cstdint>

namespace logitless::cuda::sm90::ptx {

// Four 8 x 8 matrices of 16-bit elements from the warp's accumulator layout to shared memory; lane l gives
// the address of row l % 8 of matrix l / 8 (16 bytes, aligned).
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace logitless::cuda::sm90::ptx
