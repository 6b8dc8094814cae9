#pragma once
// Memory, streams and plain problems of the tests that talk to a device themselves.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {

inline void cuda_check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Memory of the current device, full of NaN.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    if (bytes_ > 0) cuda_check(cudaMalloc(&data_, bytes_));
    clear();
  }
  explicit DeviceMemory(const std::vector<std::byte>& from) : DeviceMemory(from.size()) { write(from); }
  DeviceMemory(DeviceMemory&& from) noexcept : data_(from.data_), bytes_(from.bytes_) {
    from.data_ = nullptr;
  }
  ~DeviceMemory() { cudaFree(data_); }

  template <class T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }
  std::span<std::byte> bytes() const { return {as<std::byte>(), bytes_}; }
  // Returns once it is done: streams that do not wait for the null stream may come next.
  void clear() {
    if (bytes_ > 0) cuda_check(cudaMemset(data_, 0xff, bytes_));
    cuda_check(cudaStreamSynchronize(nullptr));
  }
  void write(const std::vector<std::byte>& from) {
    cuda_check(cudaMemcpy(data_, from.data(), from.size(), cudaMemcpyHostToDevice));
    cuda_check(cudaStreamSynchronize(nullptr));
  }
  template <class T = std::byte>
  std::vector<T> read() const {
    std::vector<T> out(bytes_ / sizeof(T));
    cuda_check(cudaMemcpy(out.data(), data_, out.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

class Stream {
 public:
  Stream() { cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { cuda_check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

inline std::vector<std::byte> encoded(const std::vector<double>& values, int32_t dtype) {
  std::vector<std::byte> out(values.size() * size_of(as_dtype(dtype)));
  for (size_t i = 0; i < values.size(); ++i)
    store(out.data(), as_dtype(dtype), static_cast<int64_t>(i), values[i]);
  return out;
}

// The tensors of a plain_case() on the current device, for any of its passes.
class PlainTensors {
 public:
  explicit PlainTensors(const Case& c) {
    inputs_.reserve(4);
    inputs_.emplace_back(encoded(c.hidden, c.problem.dtype.hidden));
    inputs_.emplace_back(encoded(c.weight, c.problem.dtype.weight));
    inputs_.emplace_back(encoded(c.bias, c.problem.dtype.bias));
    inputs_.emplace_back(encoded({c.targets.begin(), c.targets.end()}, LOGITLESS_I64));
    const auto n = static_cast<size_t>(c.problem.tokens);
    const auto output = [&](size_t bytes) { return outputs_.emplace_back(bytes).as(); };
    outputs_.reserve(7);
    b_.hidden = inputs_[0].as();
    b_.weight = inputs_[1].as();
    b_.bias = inputs_[2].as();
    b_.targets = inputs_[3].as();
    b_.lse = output(4 * n);
    b_.loss = output(4);
    b_.nll = output(4 * n);
    b_.d_hidden = output(inputs_[0].size());
    b_.d_weight = output(inputs_[1].size());
    b_.d_bias = output(inputs_[2].size());
    b_.invalid_targets = static_cast<int64_t*>(output(16));
  }

  // The buffers of a run of this pass.
  logitless::Buffers buffers(int32_t pass) const {
    logitless::Buffers b = b_;
    if (pass == LOGITLESS_FORWARD) b.d_hidden = b.d_weight = b.d_bias = nullptr;
    if (pass == LOGITLESS_BACKWARD) b.loss = b.nll = nullptr;
    return b;
  }
  DeviceMemory& targets() { return inputs_[3]; }
  void clear() {
    for (DeviceMemory& each : outputs_) each.clear();
  }
  // Everything that runs wrote.
  std::vector<std::byte> results() const {
    std::vector<std::byte> all;
    for (const DeviceMemory& each : outputs_) {
      const std::vector<std::byte> one = each.read();
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

 private:
  std::vector<DeviceMemory> inputs_, outputs_;
  logitless::Buffers b_;
};

// Runs a plan on a stream in a workspace of its own, and waits.
inline void run_and_wait(const logitless::Plan& plan, const logitless::Buffers& buffers,
                         cudaStream_t stream = nullptr) {
  const DeviceMemory workspace(plan.info().workspace_bytes);
  plan.run(buffers, workspace.bytes(), stream);
  cuda_check(cudaStreamSynchronize(stream));
}

// The context of an engine on another device than 0.
inline logitless::Context context_on(const Engine& engine, int device) {
  logitless::ContextOptions options;
  options.backend = engine.backend.c_str();
  options.engine = engine.engine.c_str();
  options.device = device;
  return logitless::Context(options);
}

}  // namespace logitless_test
