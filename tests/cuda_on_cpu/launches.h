#pragma once
// Kernels by their addresses, with their arguments as an array of pointers, as the runtime's functions take
// them.
#include <cuda_runtime_api.h>

#include <functional>
#include <tuple>
#include <utility>

namespace cuda_on_cpu {

// Copies the arguments. The result runs the kernel in one thread of a grid.
using Binding = std::function<std::function<void()>(void** arguments)>;
void remember(const void* kernel, const char* name, Binding bind);

template <class... Parameters>
const void* remember(void (*kernel)(Parameters...), const char* name) {
  const void* address = reinterpret_cast<const void*>(kernel);
  remember(address, name, [kernel](void** arguments) -> std::function<void()> {
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      const std::tuple<Parameters...> copies(*static_cast<Parameters*>(arguments[kIndex])...);
      return std::function<void()>([kernel, copies] { std::apply(kernel, copies); });
    }(std::index_sequence_for<Parameters...>{});
  });
  return address;
}

}  // namespace cuda_on_cpu
