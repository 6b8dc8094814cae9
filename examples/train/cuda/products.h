#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "train/cuda/memory.h"
#include "train/gemm.h"

namespace logitless::train::cuda {

// A product as far as its algorithm goes: train/gemm.h has the meaning of the sizes.
struct ProductForm {
  Op a_op, b_op;
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
  bool adds;  // beta is not 0
  auto operator<=>(const ProductForm&) const = default;
};

// Products of fp32 matrices on one stream by cuBLASLt, which is opened at run time. The algorithm is looked
// for once for each form and does not depend on timing.
class Products {
 public:
  // Throws std::runtime_error when cuBLASLt cannot be opened.
  Products(cudaStream_t stream, HeldBytes& held);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  void multiply(const ProductForm& form, const float* a, const float* b, float beta, float* c);

 private:
  class Operation;
  cudaStream_t stream_;
  void* handle_ = nullptr;
  Memory<std::byte> scratch_;
  std::map<ProductForm, std::unique_ptr<Operation>> operations_;
};

// Empty, or why cuBLASLt cannot be used.
std::string why_no_products();
// The library's name and version, for reports. Only where it can be used.
std::string products_library();

}  // namespace logitless::train::cuda
