#pragma once

namespace logitless::cpu {

// What plans must know of the kernels of an instruction set; a build without kernels has no more of them.
struct KernelFacts {
  const char* name = "";
  int mr = 0;                // rows of the register tile
  int nr = 0;                // columns of the register tile: two vectors
  int pair = 1;              // elements in a unit
  double gflops_thread = 1;  // rough rate of one thread, for predicted times
};

// make_kernels() compares them with the kernels that it compiles.
inline constexpr KernelFacts kAvx512Bf16{"avx512_bf16", 14, 32, 2, 185};
inline constexpr KernelFacts kAvx512{"avx512", 14, 32, 1, 95};
inline constexpr KernelFacts kAvx2{"avx2", 6, 16, 1, 80};
inline constexpr KernelFacts kNeon{"neon", 12, 8, 1, 30};
inline constexpr KernelFacts kPortable{"portable", 4, 8, 1, 8};
inline constexpr KernelFacts kScalar{"portable", 4, 2, 1, 4};

}  // namespace logitless::cpu
