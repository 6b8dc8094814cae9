#pragma once
// Stands in for the library's header of this name. A kernel whose address is taken may be launched.
#include "../../../launches.h"

namespace logitless::cuda {

template <class... Parameters>
const void* kernel_pointer(void (*kernel)(Parameters...)) {
  return cuda_on_cpu::remember(kernel, __PRETTY_FUNCTION__);
}

}  // namespace logitless::cuda
