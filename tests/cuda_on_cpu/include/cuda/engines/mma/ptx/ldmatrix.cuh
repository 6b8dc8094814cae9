#pragma once
// Stands in for the library's header of this name.
#include "language.h"

namespace logitless::cuda::mma::ptx {

inline void load_matrices(uint32_t (&to)[4], uint32_t address) {
  const cuda_on_cpu::Lanes& lanes = cuda_on_cpu::exchange(~0u, address);
  const int lane = cuda_on_cpu::lane_of_warp();
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto row = static_cast<uint32_t>(lanes.value[8 * matrix + lane / 4]);
    const auto* at = static_cast<const char*>(cuda_on_cpu::shared_at(row, 16));
    std::memcpy(&to[matrix], at + lane % 4 * 4, 4);
  }
}

}  // namespace logitless::cuda::mma::ptx
