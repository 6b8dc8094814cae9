#pragma once
#include <array>
#include <cstdint>
#include <string>

namespace logitless::cuda {

// Kinds of problems for which engines are measured and chosen apart.
enum class Work : int { kLoss, kExact, kSparsified };
inline constexpr std::array<const char*, 3> kWorkNames{"loss", "exact", "sparsified"};

// The measurements of a device (plan/device_record.h); 0 or empty where there are none.
struct Measured {
  double matmul_flops = 0;      // a second, of products of 16-bit operands
  double bytes_per_second = 0;  // read and written by a copy
  double mma_share = 0;         // of matmul_flops that the mma engine reaches without its epilogue
  std::array<std::string, kWorkNames.size()> engines;  // the fastest, by Work
  std::string source;                                  // file of the record, or "built in"
  std::string why_unreadable;                          // of a file that is no record; empty if there is none
};

// Facts about a device, queried once.
struct Device {
  int ordinal = 0;
  std::string name;
  int capability = 0;  // 90 for Hopper
  int processors = 0;  // streaming multiprocessors
  uint64_t memory_bytes = 0;
  int64_t shared_bytes = 0;  // shared memory available to a thread block
  int64_t l2_bytes = 0;
  // The vendor's figures for a model; 0 if unknown.
  double flops = 0;  // dense products of 16-bit operands
  double bytes_per_second = 0;
  Measured measured;
  // An engine that gave wrong results here (tune/self_check.h), and how they were wrong.
  std::string untrusted_engine, why_untrusted;
  std::string why_not;  // empty when usable

  std::string capability_text() const {  // "9.0"
    return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  }
};

// Returns the number of devices, or 0 with a reason in why_not if there is no driver or no device.
int device_count(std::string* why_not);

// Reports CUDA versions: the newest that the driver supports (0 without a driver), and the library's runtime.
// 13000 means 13.0.
void query_versions(int* driver, int* runtime);

// Returns cuBLASLt's version, or 0 with the reason if it cannot be opened.
int64_t cublaslt_version(std::string* why_not);

// Returns the device with this ordinal. If there is none, its why_not is set.
const Device& query_device(int ordinal);

// Allows launches of a kernel to use this much dynamic shared memory on `device`, which must be the calling
// thread's. Only the first call for each kernel and device counts, so pass the most that the kernel may need
// there.
void allow_shared_memory(const void* kernel, int device, int bytes);

// Makes a device the calling thread's device for a scope.
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
