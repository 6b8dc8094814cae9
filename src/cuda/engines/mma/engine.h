#pragma once
#include "cuda/engines/engine.h"

namespace logitless::cuda::mma {

// One fused kernel of 16-bit operands for compute capability 8.0 and newer (logits.h).
const Engine& engine();

}  // namespace logitless::cuda::mma
