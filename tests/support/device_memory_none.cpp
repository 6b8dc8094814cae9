// Stands in for device_memory.cpp in a build without CUDA, where no engine is on a device.
#include <stdexcept>

#include "device_memory.h"

namespace logitless_test {

struct DeviceMirror::Parts {};

DeviceMirror::DeviceMirror() {
  throw std::logic_error("these tests were built without CUDA");
}
DeviceMirror::~DeviceMirror() = default;
void DeviceMirror::add(GuardedMemory*) {}
void DeviceMirror::upload(size_t) {}
void* DeviceMirror::of(const void*) const {
  return nullptr;
}
std::span<std::byte> DeviceMirror::workspace() const {
  return {};
}
void* DeviceMirror::stream() const {
  return nullptr;
}
void DeviceMirror::download() {}
void copy_from_device(void*, const void*, size_t, void*) {}
void copy_to_device(void*, const void*, size_t, void*) {}
std::string DeviceMirror::workspace_violation() const {
  return "";
}

}  // namespace logitless_test
