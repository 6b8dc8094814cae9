// cuda::gemm() without cuBLASLt: sums in float64, rounded to float32 once where operands are not float64.
#include "cuda/runtime/gemm.h"
#include "cuda/runtime/queue.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {
namespace {

double element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kF64:
      return static_cast<const double*>(data)[index];
    default:
      return static_cast<const float*>(data)[index];
  }
}

void store(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(static_cast<float>(value));
      break;
    case DType::kF16:
      static_cast<__half*>(data)[index] = __float2half_rn(static_cast<float>(value));
      break;
    case DType::kF64:
      static_cast<double*>(data)[index] = value;
      break;
    default:
      static_cast<float*>(data)[index] = static_cast<float>(value);
  }
}

template <class Sum>
void multiply(const Gemm& g) {
  const float alpha = g.alpha == nullptr ? 1.0f : *g.alpha;
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < g.k; ++k) {
        const int64_t a = g.transpose_a ? k * g.a_stride + i : i * g.a_stride + k;
        const int64_t b = g.transpose_b ? j * g.b_stride + k : k * g.b_stride + j;
        sum += element(g.a, g.operand_dtype, a) * element(g.b, g.operand_dtype, b);
      }
      const int64_t c = i * g.c_stride + j;
      const Sum before = g.beta == 0 ? Sum(0) : static_cast<Sum>(element(g.c, g.c_dtype, c));
      store(g.c, g.c_dtype, c, alpha * static_cast<Sum>(sum) + before);
    }
  }
}

}  // namespace

void gemm(const Gemm& g, void* /*scratch*/, size_t /*scratch_bytes*/, const Queue& queue) {
  if (g.m == 0 || g.n == 0) return;
  queue.call(
      [g](cudaStream_t) { g.operand_dtype == DType::kF64 ? multiply<double>(g) : multiply<float>(g); });
}

const CublasLt* cublaslt(std::string* /*why_not*/) {
  static const CublasLt none{.version = [] { return size_t{0}; }};
  return &none;
}

}  // namespace logitless::cuda
