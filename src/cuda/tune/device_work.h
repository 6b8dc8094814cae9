#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/dtype.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda {

// Memory of the calling thread's device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes) {
    if (bytes == 0) return;
    const cudaError_t error = cudaMalloc(&data_, bytes);
    if (error != cudaSuccess) cudaGetLastError();  // or the next launch would report it
    check(error, "cudaMalloc");
  }
  DeviceMemory(DeviceMemory&& from) noexcept : data_(std::exchange(from.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& from) noexcept {
    std::swap(data_, from.data_);
    return *this;
  }
  ~DeviceMemory() {
    if (data_ != nullptr) cudaFree(data_);
  }
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

// A stream of its own, which waits for no other, and times on it.
class TimedStream {
 public:
  TimedStream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (cudaEvent_t* event : {&begin_, &end_}) check(cudaEventCreate(event), "cudaEventCreate");
  }
  TimedStream(const TimedStream&) = delete;
  TimedStream& operator=(const TimedStream&) = delete;
  ~TimedStream() {
    for (cudaEvent_t event : {begin_, end_}) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }

  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)
  void wait() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  // Returns the device's seconds for the work that queue() puts on the stream.
  template <class Work>
  double seconds_of(const Work& queue) const {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    queue();
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// Fills an array with numbers of mean 0 and this standard deviation, the same for the same seed. (fill.cu)
void launch_fill(void* data, DType dtype, int64_t count, double deviation, uint32_t seed,
                 cudaStream_t stream);
// Fills targets with columns in [0, columns). (fill.cu)
void launch_fill_targets(int32_t* targets, int64_t count, int64_t columns, cudaStream_t stream);

}  // namespace logitless::cuda
