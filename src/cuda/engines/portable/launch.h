#pragma once
#include "cuda/engines/engine.h"

namespace logitless::cuda::portable {

// With batch_invariant a block of threads sums a strip of a row, which has a partial of its own.
inline constexpr int64_t kStripColumns = 1536;

// Whether logits are to have the same bits for any number of rows, which cuBLASLt's products have not: those
// of batch_invariant, but for gradients, which make no such promise.
template <class Real>
bool multiplies_by_dot_products(const LogitsArgsOf<Real>& args) {
  return args.batch_invariant && args.epilogue() != Epilogue::kGradient;
}

// LogitsArgs on any device of compute capability 8.0 and more: logits of a block of rows and columns at a
// time, never rounded: fp32 ones, or float64 of such operands. One partial a row, but with batch_invariant.
template <class Real>
void launch_logits(const LogitsArgsOf<Real>& args, const LogitsScratch& scratch, const Queue& queue);

}  // namespace logitless::cuda::portable
