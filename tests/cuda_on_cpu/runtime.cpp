// The functions of CUDA's runtime that the library and its tests call, on host memory. The device has compute
// capability 9.0 by default, and its streams do everything at once.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kProcessors = 3;
constexpr size_t kSharedBytes = size_t{163} << 10;
constexpr int kL2Bytes = 4 << 20;
constexpr size_t kMemoryBytes = size_t{8} << 30;
constexpr size_t kAlignment = 512;

thread_local cudaError_t last = cudaSuccess;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "CUDA on the CPU");
  // LOGITLESS_TEST_CAPABILITY=80 makes it an older device.
  const char* capability = std::getenv("LOGITLESS_TEST_CAPABILITY");
  properties->major = capability != nullptr ? std::atoi(capability) / 10 : 9;
  properties->multiProcessorCount = kProcessors;
  properties->totalGlobalMem = kMemoryBytes;
  properties->sharedMemPerBlockOptin = kSharedBytes;
  properties->l2CacheSize = kL2Bytes;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return std::exchange(last, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA on the CPU";
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  return result(*data == nullptr && bytes > 0 ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  if (bytes > 0) std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(data, value, bytes);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}
// An event is the moment of its last record.
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new Clock::time_point(Clock::now()));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<Clock::time_point*>(event) = Clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const auto moment = [](cudaEvent_t event) { return *reinterpret_cast<const Clock::time_point*>(event); };
  *milliseconds = std::chrono::duration<float, std::milli>(moment(end) - moment(begin)).count();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Clock::time_point*>(event);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

}  // extern "C"
