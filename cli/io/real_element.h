#pragma once
#include <cstdint>

#include "io/tensor_view.h"

namespace logitless::cli {

// One element of a tensor of real numbers (is_real), exactly. For small tensors: weights, not matrices.
double real_element(const TensorView& tensor, int64_t index);

// One element of an integer tensor (is_integer). A U64 beyond 2^63 - 1 becomes 2^63 - 1.
int64_t integer_element(const TensorView& tensor, int64_t index);

// The 16-bit formats. Widening is exact; narrowing rounds to nearest even.
float bf16_to_float(uint16_t bits);
float f16_to_float(uint16_t bits);
uint16_t float_to_bf16(float value);
uint16_t float_to_f16(float value);

}  // namespace logitless::cli
