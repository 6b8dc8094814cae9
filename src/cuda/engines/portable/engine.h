#pragma once
#include "cuda/engines/engine.h"

namespace logitless::cuda::portable {

// Of any device of compute capability 8.0 and more, and any operands: a plain product into scratch and row
// kernels (logits.h).
const Engine& engine();

}  // namespace logitless::cuda::portable
