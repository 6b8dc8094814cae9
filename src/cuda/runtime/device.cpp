#include "cuda/runtime/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "cuda/plan/device_models.h"
#include "cuda/plan/device_record.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/cublaslt.h"

namespace logitless::cuda {
namespace {

Device query(int ordinal) {
  Device device;
  device.ordinal = ordinal;
  const int count = device_count(&device.why_not);
  if (count == 0) return device;
  if (ordinal < 0 || ordinal >= count) {
    device.why_not =
        "there is no CUDA device " + std::to_string(ordinal) + "; devices here: " + std::to_string(count);
    return device;
  }
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) {
    device.why_not = cudaGetErrorString(error);
    return device;
  }
  device.name = properties.name;
  device.capability = properties.major * 10 + properties.minor;
  device.processors = properties.multiProcessorCount;
  device.memory_bytes = properties.totalGlobalMem;
  device.shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  device.l2_bytes = properties.l2CacheSize;
  add_rates(device);
  add_record(device);
  if (device.capability < 80) {
    device.why_not =
        device.name + " has compute capability " + device.capability_text() + ", 8.0 or newer is needed";
  }
  return device;
}

}  // namespace

int device_count(std::string* why_not) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  cudaGetLastError();  // clears the error, which the next launch would report otherwise
  if (why_not == nullptr) return 0;
  int driver = 0, runtime = 0;
  query_versions(&driver, &runtime);
  *why_not = driver == 0            ? "there is no CUDA driver"
             : error == cudaSuccess ? "there is no CUDA device"
                                    : cudaGetErrorString(error);
  return 0;
}

void query_versions(int* driver, int* runtime) {
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
  if (cudaRuntimeGetVersion(runtime) != cudaSuccess) *runtime = 0;
}

int64_t cublaslt_version(std::string* why_not) {
  const CublasLt* functions = cublaslt(why_not);
  return functions == nullptr ? 0 : static_cast<int64_t>(functions->version());
}

const Device& query_device(int ordinal) {
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<const Device>> known;
  const std::lock_guard lock(mutex);
  std::unique_ptr<const Device>& device = known[ordinal];
  if (device == nullptr) device = std::make_unique<const Device>(query(ordinal));
  return *device;
}

void allow_shared_memory(const void* kernel, int device, int bytes) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  const std::lock_guard lock(mutex);
  if (done.contains({kernel, device})) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute");
  done.insert({kernel, device});
}

DeviceGuard::DeviceGuard(int ordinal) {
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == ordinal) return;
  check(cudaSetDevice(ordinal), "cudaSetDevice");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace logitless::cuda
