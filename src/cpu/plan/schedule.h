#pragma once
#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cpu/plan/shape.h"

namespace logitless::cpu {

inline constexpr int64_t kMostWindowsAlive = 3;

// How the CPU cuts a problem: what its plans differ in. Windows are consecutive blocks of the vocabulary.
struct Schedule {
  int threads = 1;
  int64_t token_chunk = 0;      // rows whose exps are kept at once
  int64_t kept_blocks = 0;      // the first vocabulary blocks, whose exps are kept
  int64_t forward_window = 0;   // blocks whose statistics are kept until they are merged
  int64_t backward_window = 0;  // blocks whose gradients are turned into d_hidden together
  // How many backward windows are alive at once: while one's gradients are added up, those of the next are
  // made; with a third, a late thread holds nobody up until the others are a window ahead.
  int64_t backward_windows_alive = 0;
  // Whether d_classifier and d_bias have a pass of their own, vocabulary outside and chunks of tokens inside:
  // the sum over chunks is then one window's instead of the whole classifier's, for one more product.
  bool sweeps_vocabulary = false;
  // Whether kept exps are where the gradient of their classifier rows will be, [T, B] elements at a block's
  // first row: it is written once they have been read.
  bool keeps_in_gradient = false;
};

// Vocabulary blocks that have memory in backward windows.
inline int64_t window_slots(const Schedule& schedule, const Shape& shape) {
  return std::min(shape.blocks, schedule.backward_windows_alive * schedule.backward_window);
}

// Forward windows alive at once: one is merged while the next is computed. Draws of a window wait for the
// merge.
inline int64_t forward_windows_alive(const Problem& problem, const Schedule& schedule) {
  return problem.is_thinned() || schedule.forward_window == 1 ? 1 : 2;
}

}  // namespace logitless::cpu
