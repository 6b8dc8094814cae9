#include "device_memory.h"

#include <dlfcn.h>

#include <bit>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace logitless::cli {
namespace {

// The driver's types and the one number that matters, as cuda.h has them.
using Result = int;
using Address = unsigned long long;
using Handle = void*;
constexpr Result kOutOfMemory = 2;
constexpr unsigned kNonBlocking = 1;

struct Driver {
  Result (*init)(unsigned);
  Result (*error_string)(Result, const char**);
  Result (*device_get)(int*, int);
  Result (*retain)(Handle*, int);
  Result (*release)(int);
  Result (*set_current)(Handle);
  Result (*allocate)(Address*, size_t);
  Result (*free)(Address);
  Result (*to_device)(Address, const void*, size_t, Handle);
  Result (*to_host)(void*, Address, size_t, Handle);
  Result (*fill)(Address, unsigned char, size_t, Handle);
  Result (*stream_create)(Handle*, unsigned);
  Result (*stream_destroy)(Handle);
  Result (*stream_wait)(Handle);
  Result (*event_create)(Handle*, unsigned);
  Result (*event_destroy)(Handle);
  Result (*event_record)(Handle, Handle);
  Result (*event_wait)(Handle);
  Result (*event_seconds)(float*, Handle, Handle);  // in milliseconds
};

template <class F>
void find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  if (*function == nullptr) throw std::runtime_error(std::string("the CUDA driver lacks ") + name);
}

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("there is no CUDA driver (libcuda.so.1) here");
  Driver d{};
  find(library, "cuInit", &d.init);
  find(library, "cuGetErrorString", &d.error_string);
  find(library, "cuDeviceGet", &d.device_get);
  find(library, "cuDevicePrimaryCtxRetain", &d.retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", &d.release);
  find(library, "cuCtxSetCurrent", &d.set_current);
  find(library, "cuMemAlloc_v2", &d.allocate);
  find(library, "cuMemFree_v2", &d.free);
  find(library, "cuMemcpyHtoDAsync_v2", &d.to_device);
  find(library, "cuMemcpyDtoHAsync_v2", &d.to_host);
  find(library, "cuMemsetD8Async", &d.fill);
  find(library, "cuStreamCreate", &d.stream_create);
  find(library, "cuStreamDestroy_v2", &d.stream_destroy);
  find(library, "cuStreamSynchronize", &d.stream_wait);
  find(library, "cuEventCreate", &d.event_create);
  find(library, "cuEventDestroy_v2", &d.event_destroy);
  find(library, "cuEventRecord", &d.event_record);
  find(library, "cuEventSynchronize", &d.event_wait);
  find(library, "cuEventElapsedTime", &d.event_seconds);
  return d;
}

const Driver& driver() {
  static const Driver kDriver = open_driver();
  return kDriver;
}

void check(Result result, const char* what) {
  if (result == 0) return;
  if (result == kOutOfMemory) throw std::bad_alloc();
  const char* text = nullptr;
  driver().error_string(result, &text);
  throw std::runtime_error(std::string("CUDA: ") + what + ": " +
                           (text != nullptr ? std::string(text) : "error " + std::to_string(result)));
}

Address address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

}  // namespace

struct CudaDevice::Parts {
  int device = 0;
  Handle stream = nullptr;
};

// The library's runtime works in the device's primary context, too.
CudaDevice::CudaDevice(int ordinal) : parts_(std::make_unique<Parts>()) {
  check(driver().init(0), "cuInit");
  check(driver().device_get(&parts_->device, ordinal), "cuDeviceGet");
  Handle context = nullptr;
  check(driver().retain(&context, parts_->device), "opening the device");
  try {
    check(driver().set_current(context), "cuCtxSetCurrent");
    check(driver().stream_create(&parts_->stream, kNonBlocking), "cuStreamCreate");
  } catch (...) {
    driver().release(parts_->device);
    throw;
  }
}

CudaDevice::~CudaDevice() {
  driver().stream_wait(parts_->stream);
  driver().stream_destroy(parts_->stream);
  driver().release(parts_->device);
}

void* CudaDevice::stream() const {
  return parts_->stream;
}

void CudaDevice::wait() const {
  check(driver().stream_wait(parts_->stream), "the run");
}

void CudaDevice::upload(void* to, std::span<const std::byte> from) const {
  if (from.empty()) return;
  check(driver().to_device(address_of(to), from.data(), from.size(), parts_->stream),
        "copying to the device");
  wait();
}

void CudaDevice::download(std::span<std::byte> to, const void* from) const {
  if (to.empty()) return;
  check(driver().to_host(to.data(), address_of(from), to.size(), parts_->stream), "copying from the device");
  wait();
}

void CudaDevice::fill(void* to, size_t bytes, unsigned char value) const {
  if (bytes > 0) check(driver().fill(address_of(to), value, bytes, parts_->stream), "filling memory");
}

DeviceMemory::DeviceMemory(const CudaDevice& device, size_t bytes) : device_(device), size_(bytes) {
  if (bytes == 0) return;
  Address address = 0;
  check(driver().allocate(&address, bytes), "cuMemAlloc");
  data_ = std::bit_cast<std::byte*>(address);
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  driver().stream_wait(device_.parts_->stream);
  driver().free(address_of(data_));
}

DeviceTimer::DeviceTimer(const CudaDevice& device) : device_(device) {
  check(driver().event_create(&start_, 0), "cuEventCreate");
  const Result result = driver().event_create(&stop_, 0);
  if (result != 0) driver().event_destroy(start_);
  check(result, "cuEventCreate");
}

DeviceTimer::~DeviceTimer() {
  driver().event_destroy(start_);
  driver().event_destroy(stop_);
}

void DeviceTimer::start() {
  check(driver().event_record(start_, device_.parts_->stream), "cuEventRecord");
}

void DeviceTimer::stop() {
  check(driver().event_record(stop_, device_.parts_->stream), "cuEventRecord");
}

double DeviceTimer::seconds() const {
  float milliseconds = 0;
  check(driver().event_wait(stop_), "the run");
  check(driver().event_seconds(&milliseconds, start_, stop_), "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace logitless::cli
