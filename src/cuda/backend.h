#pragma once
#include "core/backend.h"

namespace logitless {

// The backend of CUDA devices of compute capability 8.0 and newer. Its engines are:
// - sm90: fused kernels for Hopper.
// - mma: fused kernels for compute capability 8.0 and newer, only when requested.
// - portable: row kernels and products by cuBLASLt, which is opened at run time. It has its own products in
// float64.
const Backend& cuda_backend();

}  // namespace logitless
