#pragma once
#include <cstdint>

namespace logitless::cuda::mma::ptx {

// Loads four 8 x 8 matrices of 16-bit elements from shared memory, with a whole warp. Lane l gives the
// address of row l % 8 of matrix l / 8, which has 16 bytes and is aligned to 16. From matrix i, a lane gets
// the elements 2 (lane % 4) and the next one of row lane / 4, the first in the lower half of to[i] (PTX ISA,
// "ldmatrix").
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

}  // namespace logitless::cuda::mma::ptx
