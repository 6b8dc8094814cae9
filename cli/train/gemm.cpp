#include "train/gemm.h"

#include <dnnl.h>

#include <stdexcept>
#include <string>

namespace headroom::train {

void gemm(Op a_op, Op b_op, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc) {
  const dnnl_status_t status =
      dnnl_sgemm(a_op == Op::kTranspose ? 'T' : 'N', b_op == Op::kTranspose ? 'T' : 'N', m, n, k, 1.0F, a,
                 lda, b, ldb, beta, c, ldc);
  if (status != dnnl_success) {
    throw std::runtime_error("dnnl_sgemm failed with status " + std::to_string(status) + " for m " +
                             std::to_string(m) + ", n " + std::to_string(n) + ", k " + std::to_string(k));
  }
}

const char* gemm_library() {
  static const std::string name = [] {
    const dnnl_version_t* version = dnnl_version();
    return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
           std::to_string(version->patch);
  }();
  return name.c_str();
}

}  // namespace headroom::train
