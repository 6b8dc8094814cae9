// A stand-in for oneDNN, which machines with a GPU need not have: dnnl_sgemm as plain loops with sums in
// float64, rounded once. With it the demonstration's host network is a reference for the device's.
#include <cstdint>

extern "C" {

__attribute__((visibility("default"))) int dnnl_sgemm(char a_op, char b_op, int64_t m, int64_t n, int64_t k,
                                                      float alpha, const float* a, int64_t lda,
                                                      const float* b, int64_t ldb, float beta, float* c,
                                                      int64_t ldc) {
  const bool a_turned = a_op == 'T', b_turned = b_op == 'T';
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t d = 0; d < k; ++d) {
        sum += double{a[a_turned ? d * lda + i : i * lda + d]} * b[b_turned ? j * ldb + d : d * ldb + j];
      }
      float& out = c[i * ldc + j];
      out = static_cast<float>(alpha * sum) + (beta == 0 ? 0.0F : beta * out);
    }
  }
  return 0;
}

__attribute__((visibility("default"))) const int* dnnl_version() {
  static const int version[] = {3, 0, 0};
  return version;
}

}  // extern "C"
