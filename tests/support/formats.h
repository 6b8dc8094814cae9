#pragma once
#include <headroom/headroom.h>
#include <cstddef>
#include <cstdint>

namespace headroom_test {

// Number formats, written from their definitions and apart from the library's own conversions.
size_t size_of(headroom_dtype dtype);
const char* name_of(headroom_dtype dtype);

// Significant bits, the hidden one included.
int precision(headroom_dtype dtype);
// Largest relative error of one rounding of a normal number: 2^-precision.
double rounding_unit(headroom_dtype dtype);
// Largest absolute error of rounding a subnormal number: half of the smallest positive one.
double subnormal_unit(headroom_dtype dtype);

// The nearest number of the format, ties to even; infinity past the largest.
double rounded(double value, headroom_dtype dtype);

double load(const void* data, headroom_dtype dtype, int64_t index);
void store(void* data, headroom_dtype dtype, int64_t index, double value);

}  // namespace headroom_test
