#pragma once
#include "cuda/engines/engine.h"

namespace headroom::cuda::sm90 {

// Hopper's: one fused kernel of 16-bit operands (logits.h).
const Engine& engine();

}  // namespace headroom::cuda::sm90
