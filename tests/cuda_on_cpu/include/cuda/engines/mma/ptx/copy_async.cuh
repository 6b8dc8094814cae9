#pragma once
// Stands in for the library's header of this name.
#include "language.h"

namespace logitless::cuda::mma::ptx {

inline void copy_async(uint32_t to, const void* from, int bytes) {
  cuda_on_cpu::copy_async(to, from, bytes);
}
inline void copy_async(uint32_t to, const void* from) {
  cuda_on_cpu::copy_async(to, from, 16);
}
inline void copy_async_commit() {
  cuda_on_cpu::copy_async_commit();
}
template <int kPending>
void copy_async_wait() {
  cuda_on_cpu::copy_async_wait(kPending);
}

}  // namespace logitless::cuda::mma::ptx
