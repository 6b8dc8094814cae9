#pragma once

// The one place that knows which library multiplies the matrices of the model's body. It is opened when it is
// first needed, so that everything else works where it is not installed.

#include <cstdint>
#include <string>

namespace logitless::train {

enum class Op { kNone, kTranspose };

// c [m, n] = op(a) [m, k] * op(b) [k, n] + beta * c, row-major fp32; `lda`, `ldb`, `ldc` are the row strides
// of the matrices as stored. Throws std::runtime_error when the library is not there or refuses the call.
void gemm(Op a_op, Op b_op, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
          int64_t ldb, float beta, float* c, int64_t ldc);

// Empty, or why the library cannot be used.
std::string why_no_gemm();

// The library's name and version, for reports. Only where it can be used.
std::string gemm_library();

}  // namespace logitless::train
