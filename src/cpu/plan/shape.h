#pragma once
#include <cstdint>

#include "core/problem.h"
#include "cpu/simd/kernels.h"

namespace logitless::cpu {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

// How a problem is cut up. A pure function of the problem and the kernels: not of the budget and not of the
// number of threads, so the order of every sum, and with it every bit of the result, depends on neither.
struct Shape {
  int64_t vocab_block = 0;      // columns of logits in one block: a multiple of the register tile both ways
  int64_t blocks = 0;           // of the vocabulary
  int64_t token_block = 0;      // tokens in one partial sum of d_classifier
  int64_t hidden_units = 0;     // units in a row of hidden or classifier
  int64_t hidden_stride = 0;    // units between packed rows of hidden
  int64_t hidden_padded = 0;    // columns of a gradient row, a multiple of nr
  int64_t gradient_stride = 0;  // floats between rows of the fp32 d_hidden
  int64_t range = 0;            // columns of d_classifier that one task computes
  int64_t ranges = 0;

  int64_t block_columns(int64_t vocab, int64_t block) const {
    const int64_t left = vocab - block * vocab_block;
    return left < vocab_block ? left : vocab_block;
  }
};

Shape make_shape(const Problem& problem, const Kernels& kernels);

// Whether exps kept from the forward pass can become gradients by one factor a row. Otherwise the gradient
// needs the logits themselves again.
inline bool keeps_exps(const Problem& p) {
  return p.pass == Pass::kForwardBackward && !(p.label_smoothing > 0 && p.softcap > 0);
}

}  // namespace logitless::cpu
