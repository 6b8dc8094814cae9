#pragma once
#include <algorithm>
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

// How a problem is cut up. It is a pure function of the problem and the kernels. The budget and the number of
// threads have no part in it, so neither changes the order of a sum, nor any bit of the result.
struct Shape {
  int64_t vocab_block = 0;      // columns of logits in one block: a multiple of the register tile both ways
  int64_t blocks = 0;           // blocks of the vocabulary
  int64_t token_block = 0;      // tokens in one partial sum of d_weight
  int64_t hidden_units = 0;     // units in a row of hidden or weight
  int64_t hidden_stride = 0;    // units between packed rows of hidden
  int64_t hidden_padded = 0;    // columns of a gradient row, a multiple of nr
  int64_t gradient_stride = 0;  // floats between rows of the fp32 d_hidden
  int64_t range = 0;            // columns of d_weight that one task computes
  int64_t ranges = 0;

  int64_t block_columns(int64_t vocab, int64_t block) const {
    const int64_t left = vocab - block * vocab_block;
    return left < vocab_block ? left : vocab_block;
  }
};

Shape make_shape(const Problem& problem, const Kernels& kernels);

// Whether exp logits kept from the forward pass can become gradients by one factor a row. Otherwise the
// gradient needs the logits themselves again.
inline bool keeps_exp_logits(const Problem& p) {
  return p.pass == Pass::kForwardBackward && !(p.label_smoothing > 0 && p.softcap > 0);
}

inline constexpr int64_t kMostWindowsAlive = 3;

// The part of a CPU plan that differs between plans. Windows are consecutive blocks of the vocabulary.
struct Schedule {
  int threads = 1;
  int64_t token_chunk = 0;      // rows whose exp logits are kept at once
  int64_t kept_blocks = 0;      // the first vocabulary blocks, whose exp logits are kept
  int64_t forward_window = 0;   // blocks whose statistics are kept until they are merged
  int64_t backward_window = 0;  // blocks whose gradients are turned into d_hidden together
  // Backward windows alive at once. While one's gradients are added up, those of the next are made. With a
  // third, a late thread holds nobody up until the others are a window ahead.
  int64_t backward_windows_alive = 0;
  // Whether d_weight and d_bias have a pass of their own, vocabulary outside and chunks of tokens inside. The
  // sum over chunks then covers one window instead of the whole weight, and costs one more product.
  bool sweeps_vocabulary = false;
  // Whether kept exp logits lie where the gradient of their weight rows will be: [T, B] elements at a block's
  // first row. The gradient is written once they have been read.
  bool keeps_in_gradient = false;
};

// Vocabulary blocks that have memory in backward windows.
inline int64_t window_partials(const Schedule& schedule, const Shape& shape) {
  return std::min(shape.blocks, schedule.backward_windows_alive * schedule.backward_window);
}

// Forward windows alive at once: one is merged while the next is computed. A window's draws wait for the
// merge.
inline int64_t forward_windows_alive(const Problem& problem, const Schedule& schedule) {
  return problem.is_sparsified() || schedule.forward_window == 1 ? 1 : 2;
}

}  // namespace logitless::cpu
