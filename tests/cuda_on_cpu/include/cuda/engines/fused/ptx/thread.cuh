#pragma once
// Stands in for the library's header of this name.
#include "language.h"

namespace logitless::cuda::fused::ptx {

inline int thread_index() {
  return static_cast<int>(threadIdx.x);
}

inline bool always() {
  return true;
}

inline void forget(float&, float&) {}
inline void forget(float&) {}

inline void named_barrier_sync(int barrier, int threads) {
  cuda_on_cpu::wait_for_named(barrier, static_cast<unsigned>(threads));
}

}  // namespace logitless::cuda::fused::ptx
