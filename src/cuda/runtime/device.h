#pragma once
#include <cstdint>
#include <string>

namespace logitless::cuda {

// Facts about a device, asked once.
struct Device {
  int ordinal = 0;
  std::string name;
  int capability = 0;  // 90 for Hopper
  int processors = 0;  // streaming multiprocessors
  uint64_t memory_bytes = 0;
  int64_t shared_bytes = 0;  // of shared memory that a thread block may have
  int64_t l2_bytes = 0;
  // By the vendor, of a model; 0: not known.
  double flops = 0;  // dense products of 16-bit operands
  double bytes_per_second = 0;
  std::string why_not;  // empty when usable

  std::string capability_text() const {  // "9.0"
    return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  }
};

// How many devices; 0 with a reason in why_not when there is no driver or no device.
int device_count(std::string* why_not);

// Of CUDA: what the driver supports (0 without one), and of the runtime in the library. 13000 is 13.0.
void query_versions(int* driver, int* runtime);

// Of cuBLASLt; 0, with the reason, where it cannot be opened.
int64_t cublaslt_version(std::string* why_not);

// Of an ordinal; a Device whose why_not is set when there is none such.
const Device& query_device(int ordinal);

// Lets launches of a kernel have so many bytes of dynamic shared memory on `device`, which is the calling
// thread's. Only the first call for both counts, so ask for the most that the kernel may need there.
void allow_shared_memory(const void* kernel, int device, int bytes);

// Makes a device the calling thread's for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace logitless::cuda
