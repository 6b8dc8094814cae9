#pragma once
// Device arrays with guarded ends, for the tests of single kernels.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace logitless::cuda::test {

inline void check_cuda(cudaError_t error) {
  ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// Tests skip where there is none.
inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// A device array between two guards of 256 bytes.
template <class T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count_(count) {
    check_cuda(cudaMalloc(&base_, bytes() + 2 * kGuard));
    check_cuda(cudaMemset(base_, kPattern, bytes() + 2 * kGuard));
  }
  explicit Guarded(const std::vector<T>& values) : Guarded(values.size()) { write(values); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { cudaFree(base_); }

  T* get() const { return reinterpret_cast<T*>(base_ + kGuard); }
  void write(const std::vector<T>& values) {
    check_cuda(cudaMemcpy(get(), values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    check_cuda(cudaMemcpy(values.data(), get(), bytes(), cudaMemcpyDeviceToHost));
    return values;
  }
  void expect_guards() const {
    std::vector<uint8_t> ends(2 * kGuard);
    check_cuda(cudaMemcpy(ends.data(), base_, kGuard, cudaMemcpyDeviceToHost));
    check_cuda(cudaMemcpy(ends.data() + kGuard, base_ + kGuard + bytes(), kGuard, cudaMemcpyDeviceToHost));
    for (const uint8_t byte : ends) ASSERT_EQ(byte, kPattern) << "written past an end";
  }

  static constexpr uint8_t kPattern = 0xA5;

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes() const { return count_ * sizeof(T); }
  size_t count_;
  uint8_t* base_ = nullptr;
};

}  // namespace logitless::cuda::test
