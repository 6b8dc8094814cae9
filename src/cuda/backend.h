#pragma once
#include "core/backend.h"

namespace logitless {

// CUDA devices of compute capability 8.0 and newer. Engines: sm90 (Hopper, fused kernels), mma (fused
// kernels of compute capability 8.0 and newer, only when asked for) and portable (products by cuBLASLt, which
// is opened at run time, and row kernels; in float64 with products of its own).
const Backend& cuda_backend();

}  // namespace logitless
