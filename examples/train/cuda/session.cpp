#include "train/cuda/session.h"

#include "train/cuda/products.h"

namespace logitless::train::cuda {
namespace {

cudaStream_t make_stream(int ordinal) {
  check(cudaSetDevice(ordinal), "cudaSetDevice(" + std::to_string(ordinal) + ")");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

std::string name_of(int ordinal) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  return std::string(properties.name) + " (cuda:" + std::to_string(ordinal) + ")";
}

}  // namespace

Session::Session(int ordinal) : name_(name_of(ordinal)), stream_(make_stream(ordinal)) {
  try {
    products_ = std::make_unique<Products>(stream_, held_);
  } catch (...) {
    cudaStreamDestroy(stream_);
    throw;
  }
}

Session::~Session() {
  cudaStreamSynchronize(stream_);
  products_.reset();
  cudaStreamDestroy(stream_);
}

void Session::copy(void* to, const void* from, size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  wait();
}

void Session::copy_on_device(float* to, const float* from, int64_t count) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float), cudaMemcpyDeviceToDevice,
                        stream_),
        "cudaMemcpyAsync");
}

void Session::clear(float* data, int64_t count) {
  check(cudaMemsetAsync(data, 0, static_cast<size_t>(count) * sizeof(float), stream_), "cudaMemsetAsync");
}

void Session::wait() {
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void Session::gemm(Op a_op, Op b_op, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
                   const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  products_->multiply({a_op, b_op, m, n, k, lda, ldb, ldc, beta != 0}, a, b, beta, c);
}

}  // namespace logitless::train::cuda
