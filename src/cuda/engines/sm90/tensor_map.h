#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/dtype.h"

namespace logitless::cuda::sm90 {

// Describes a row-major [rows, columns] matrix of bf16, fp16 or e4m3, with the stride in elements. Its boxes
// have kRowBytes of each row in the 128-byte swizzle.
CUtensorMap make_tensor_map(const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                            int box_rows);

}  // namespace logitless::cuda::sm90
