#pragma once
#include <cstddef>
#include <memory>
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

  void* stream() const;  // a cudaStream_t
  void wait() const;     // until the stream is empty

  // All in the order of the stream; the host's memory may be used again when these return.
  void upload(void* to, std::span<const std::byte> from) const;
  void download(std::span<std::byte> to, const void* from) const;
  void fill(void* to, size_t bytes, unsigned char value) const;

 private:
  friend class DeviceMemory;
  friend class DeviceTimer;
  struct Parts;
  std::unique_ptr<Parts> parts_;
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

// The time between two points of a device's stream.
class DeviceTimer {
 public:
  explicit DeviceTimer(const CudaDevice& device);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  void start();
  void stop();
  double seconds() const;  // waits for the second point

 private:
  const CudaDevice& device_;
  void* start_ = nullptr;
  void* stop_ = nullptr;
};

}  // namespace logitless::cli
