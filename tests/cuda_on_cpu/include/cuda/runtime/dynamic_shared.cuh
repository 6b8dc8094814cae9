#pragma once
// Stands in for the library's header of this name.
#include "language.h"

namespace logitless::cuda {

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(cuda_on_cpu::dynamic_shared_memory());
}

}  // namespace logitless::cuda
