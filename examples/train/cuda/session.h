#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "train/cuda/memory.h"
#include "train/gemm.h"

namespace logitless::train::cuda {

class Products;

// One device, made the calling thread's current one, with a stream that all work of a run is queued on, and
// the bytes that it holds.
class Session {
 public:
  explicit Session(int ordinal);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  cudaStream_t stream() const { return stream_; }
  HeldBytes& held() { return held_; }
  const std::string& device_name() const { return name_; }

  template <class T>
  Memory<T> allocate(int64_t count) {
    return Memory<T>(held_, count);
  }

  // The host's memory may be used again when these return.
  template <class T>
  void upload(const Memory<T>& to, const std::vector<T>& from) {
    copy(to.data(), from.data(), from.size() * sizeof(T));
  }
  template <class T>
  void download(std::vector<T>& to, const Memory<T>& from) {
    to.resize(static_cast<size_t>(from.count()));
    copy(to.data(), from.data(), to.size() * sizeof(T));
  }
  // On the device, and not waited for.
  void copy_on_device(float* to, const float* from, int64_t count);
  void clear(float* data, int64_t count);
  void wait();

  // As train/gemm.h says, of matrices on the device whose first elements are aligned to 256 bytes; sums in
  // fp32.
  void gemm(Op a_op, Op b_op, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
            int64_t ldb, float beta, float* c, int64_t ldc);

 private:
  void copy(void* to, const void* from, size_t bytes);

  std::string name_;
  cudaStream_t stream_ = nullptr;
  HeldBytes held_;
  std::unique_ptr<Products> products_;
};

}  // namespace logitless::train::cuda
