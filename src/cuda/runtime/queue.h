#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <type_traits>
#include <utility>

#include "cuda/runtime/kernel_pointer.h"

namespace logitless::cuda {

class Recording;

// The destination of a run's work: a stream, or a recording that is played on streams later.
class Queue {
 public:
  Queue(cudaStream_t stream) : stream_(stream) {}  // NOLINT(google-explicit-constructor)
  explicit Queue(Recording* recording) : recording_(recording) {}

  // Launches kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...). `name` appears in errors.
  template <class... Parameters>
  void launch(const char* name, void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes,
              const std::type_identity_t<Parameters>&... arguments) const {
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    launch(name, config, kernel_pointer(kernel), pointers);
  }
  // Launches a kernel with attributes; config's stream is ignored.
  void launch(const char* name, cudaLaunchConfig_t config, const void* kernel, void** arguments) const;

  void clear(void* data, size_t bytes) const;

  // Calls body(stream), for work that only streams take. It may be called many times, so everything that it
  // refers to is copied.
  template <class F>
  void call(F&& body) const {
    if (recording_ == nullptr) {
      body(stream_);
    } else {
      record(std::forward<F>(body));
    }
  }

  bool records() const { return recording_ != nullptr; }
  cudaStream_t stream() const { return stream_; }  // null when recording

 private:
  void record(std::function<void(cudaStream_t)> body) const;

  cudaStream_t stream_ = nullptr;
  Recording* recording_ = nullptr;
};

}  // namespace logitless::cuda
