// cuda::gemm() without cuBLASLt. It sums in float64, and rounds once to float32 unless operands are float64.
#include "cuda/runtime/gemm.h"

#include <numeric>
#include <vector>

#include "cuda/rows/device_rows.cuh"
#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {
namespace {

// Rows of numbers that are multiplied with one another.
template <class T>
std::vector<double> numbers(const auto& matrix, bool is_transposed, int64_t rows, int64_t length) {
  std::vector<double> out;
  out.reserve(static_cast<size_t>(rows * length));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < length; ++k) {
      out.push_back(
          double{to_real(is_transposed ? matrix.template row<T>(k)[i] : matrix.template row<T>(i)[k])});
    }
  }
  return out;
}

template <class T, class C>
void multiply(const Gemm& g) {
  using Sum = RealOf<C>;
  const Sum alpha = g.alpha == nullptr ? 1 : *g.alpha;
  const std::vector<double> a = numbers<T>(g.a, g.transpose_a, g.m, g.k),
                            b = numbers<T>(g.b, !g.transpose_b, g.n, g.k);
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      const double sum =
          std::inner_product(a.data() + i * g.k, a.data() + (i + 1) * g.k, b.data() + j * g.k, 0.0);
      C& c = g.c.row<C>(i)[j];
      const Sum before = g.beta == 0 ? Sum(0) : Sum(to_real(c));
      c = from_real<C>(alpha * static_cast<Sum>(sum) + before);
    }
  }
}

}  // namespace

void gemm(const Gemm& g, void* /*scratch*/, size_t /*scratch_bytes*/, const Queue& queue) {
  if (g.m == 0 || g.n == 0) return;
  queue.call([g](cudaStream_t) {
    for_any_dtypes(g.a.dtype, g.c.dtype, [&](auto a, auto c) { multiply<decltype(a), decltype(c)>(g); });
  });
}

const CublasLt* cublaslt(std::string* /*why_not*/) {
  static const CublasLt none{.version = [] { return size_t{0}; }};
  return &none;
}

}  // namespace logitless::cuda
