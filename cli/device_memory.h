#pragma once
#include <cstddef>
#include <functional>
#include <span>

namespace logitless::cli {

// A CUDA device through its driver, opened at run time, so that this program starts on machines without one:
// memory, a stream and times on it. Made for one thread, on which the device stays current. Everything throws
// std::runtime_error with the driver's words; an allocation that does not fit throws std::bad_alloc.
class CudaDevice {
 public:
  explicit CudaDevice(int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  void* stream() const { return stream_; }  // a cudaStream_t
  void wait() const;                        // until the stream is empty

  // All in the order of the stream; the host's memory may be used again when these return.
  void upload(void* to, std::span<const std::byte> from) const;
  void download(std::span<std::byte> to, const void* from) const;
  void fill(void* to, size_t bytes, unsigned char value) const;
  // The device's own time of the work that `launch` puts on the stream; waits for it.
  double seconds_of(const std::function<void()>& launch) const;

 private:
  int device_ = 0;
  void* stream_ = nullptr;
};

// Memory of a device, aligned to 256 bytes, uninitialised.
class DeviceMemory {
 public:
  DeviceMemory(const CudaDevice& device, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const CudaDevice& device_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace logitless::cli
