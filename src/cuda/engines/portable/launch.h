#pragma once
#include "cuda/engines/engine.h"

namespace logitless::cuda::portable {

// With batch_invariant, a block of threads sums a strip of a row, which has its own partial.
inline constexpr int64_t kStripColumns = 1536;

// Whether logits must have the same bits for any number of rows, which cuBLASLt's products do not guarantee.
// This holds with batch_invariant, except for gradients, which make no such promise.
template <class Real>
bool multiplies_by_dot_products(const LogitsArgsOf<Real>& args) {
  return args.batch_invariant && args.epilogue() != Epilogue::kGradient;
}

// Runs a launch on any device of compute capability 8.0 and newer. It makes logits of a block of rows and
// columns at a time and never rounds them: fp32, or float64 for float64 operands. There is one partial for
// each row, except with batch_invariant.
template <class Real>
void launch_logits(const LogitsArgsOf<Real>& args, const LogitsScratch& scratch, const Queue& queue);

}  // namespace logitless::cuda::portable
