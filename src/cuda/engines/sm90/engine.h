#pragma once
#include "cuda/engines/engine.h"

namespace logitless::cuda::sm90 {

// Hopper's: one fused kernel of 16-bit operands (logits.h).
const Engine& engine();

}  // namespace logitless::cuda::sm90
