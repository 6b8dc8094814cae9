#pragma once

namespace logitless::cuda {

// The address of a kernel, as the runtime's functions take it.
template <class... Parameters>
const void* kernel_pointer(void (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace logitless::cuda
