// The demonstration's products without cuBLASLt: sums in float64, rounded to float32 once.
#include "train/cuda/products.h"

namespace logitless::train::cuda {

class Products::Operation {};

Products::Products(cudaStream_t stream, HeldBytes& /*held*/) : stream_(stream) {}
Products::~Products() = default;

void Products::multiply(const ProductForm& p, const float* a, const float* b, float beta, float* c) {
  const bool a_turned = p.a_op == Op::kTranspose, b_turned = p.b_op == Op::kTranspose;
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < p.k; ++k) {
        sum +=
            double{a[a_turned ? k * p.lda + i : i * p.lda + k]} * b[b_turned ? j * p.ldb + k : k * p.ldb + j];
      }
      float& out = c[i * p.ldc + j];
      out = static_cast<float>(sum) + (p.adds ? beta * out : 0.0F);
    }
  }
}

std::string why_no_products() {
  return "";
}

std::string products_library() {
  return "plain loops";
}

}  // namespace logitless::train::cuda
