#pragma once

namespace logitless::cuda {

// Returns the address of a kernel in the form that the runtime's functions take.
template <class... Parameters>
const void* kernel_pointer(void (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace logitless::cuda
