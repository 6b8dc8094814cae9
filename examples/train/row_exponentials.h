#pragma once

#include <cstdint>

namespace logitless::train {

// z[j] = exp(z[j] - max) for one row; returns their sum. In a file of its own because it is compiled with
// -ffast-math, which lets the compiler call the vector exp of the C library.
float row_exponentials(float* z, int64_t count, float max);

}  // namespace logitless::train
