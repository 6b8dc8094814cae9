#pragma once

#include <cstdint>

namespace logitless::train {

// y[i] = gain * x[i] / sqrt(mean(x[i]^2) + epsilon), row by row. `inverse_rms` [rows] is kept for the
// backward.
void rms_norm(int64_t rows, int64_t dim, const float* x, const float* gain, float* y, float* inverse_rms);

// Adds the gradient with respect to x to `d_x` and writes the gradient of the gain.
void rms_norm_backward(int64_t rows, int64_t dim, const float* x, const float* gain, const float* inverse_rms,
                       const float* d_y, float* d_x, float* d_gain);

}  // namespace logitless::train
