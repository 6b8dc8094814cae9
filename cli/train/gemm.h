#pragma once

// The one place that knows which library multiplies the matrices of the model's body.

#include <cstdint>

namespace headroom::train {

enum class Op { kNone, kTranspose };

// c [m, n] = op(a) [m, k] * op(b) [k, n] + beta * c, row-major fp32; `lda`, `ldb`, `ldc` are the row strides
// of the matrices as stored. Throws std::runtime_error when the library refuses the call.
void gemm(Op a_op, Op b_op, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc);

// The library's name and version, for reports.
const char* gemm_library();

}  // namespace headroom::train
