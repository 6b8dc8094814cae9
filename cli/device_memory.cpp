#include "device_memory.h"

#include <dlfcn.h>

#include <bit>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace logitless::cli {
namespace {

// The driver's types and the numbers that matter, as cuda.h has them.
using Address = unsigned long long;
using Handle = void*;
constexpr int kOutOfMemory = 2;
constexpr unsigned kNonBlocking = 1;

// Calls a function of the driver with arguments of just these types. Returns its CUresult.
template <class... Arguments>
int call(const char* name, Arguments... arguments) {
  static void* const kLibrary = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (kLibrary == nullptr) throw std::runtime_error("there is no CUDA driver (libcuda.so.1) here");
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(kLibrary, name));
  if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver lacks ") + name);
  return function(arguments...);
}

// Throws where it fails.
template <class... Arguments>
void must(const char* name, Arguments... arguments) {
  const int result = call(name, arguments...);
  if (result == 0) return;
  if (result == kOutOfMemory) throw std::bad_alloc();
  const char* text = nullptr;
  call("cuGetErrorString", result, &text);
  throw std::runtime_error(std::string("CUDA: ") + name + ": " +
                           (text != nullptr ? std::string(text) : "error " + std::to_string(result)));
}

Address address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

}  // namespace

// The library's runtime works in the device's primary context, too.
CudaDevice::CudaDevice(int ordinal) {
  must("cuInit", 0U);
  must("cuDeviceGet", &device_, ordinal);
  Handle context = nullptr;
  must("cuDevicePrimaryCtxRetain", &context, device_);
  try {
    must("cuCtxSetCurrent", context);
    must("cuStreamCreate", &stream_, kNonBlocking);
  } catch (...) {
    call("cuDevicePrimaryCtxRelease_v2", device_);
    throw;
  }
}

CudaDevice::~CudaDevice() {
  call("cuStreamSynchronize", stream_);
  call("cuStreamDestroy_v2", stream_);
  call("cuDevicePrimaryCtxRelease_v2", device_);
}

void CudaDevice::wait() const {
  must("cuStreamSynchronize", stream_);
}

void CudaDevice::upload(void* to, std::span<const std::byte> from) const {
  if (from.empty()) return;
  must("cuMemcpyHtoDAsync_v2", address_of(to), static_cast<const void*>(from.data()), from.size(), stream_);
  wait();
}

void CudaDevice::download(std::span<std::byte> to, const void* from) const {
  if (to.empty()) return;
  must("cuMemcpyDtoHAsync_v2", static_cast<void*>(to.data()), address_of(from), to.size(), stream_);
  wait();
}

void CudaDevice::fill(void* to, size_t bytes, unsigned char value) const {
  if (bytes > 0) must("cuMemsetD8Async", address_of(to), value, bytes, stream_);
}

double CudaDevice::seconds_of(const std::function<void()>& launch) const {
  struct Event {
    Event() { must("cuEventCreate", &handle, 0U); }
    ~Event() { call("cuEventDestroy_v2", handle); }
    Handle handle = nullptr;
  } const start, stop;
  must("cuEventRecord", start.handle, stream_);
  launch();
  must("cuEventRecord", stop.handle, stream_);
  must("cuEventSynchronize", stop.handle);
  float milliseconds = 0;
  must("cuEventElapsedTime", &milliseconds, start.handle, stop.handle);
  return static_cast<double>(milliseconds) * 1e-3;
}

DeviceMemory::DeviceMemory(const CudaDevice& device, size_t bytes) : device_(device), size_(bytes) {
  if (bytes == 0) return;
  Address address = 0;
  must("cuMemAlloc_v2", &address, bytes);
  data_ = std::bit_cast<std::byte*>(address);
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  call("cuStreamSynchronize", device_.stream());
  call("cuMemFree_v2", address_of(data_));
}

}  // namespace logitless::cli
