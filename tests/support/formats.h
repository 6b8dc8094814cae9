#pragma once
#include <logitless/logitless.h>
#include <cstddef>
#include <cstdint>

namespace logitless_test {

// Number formats, written from their definitions and apart from the library's own conversions.
size_t size_of(logitless_dtype dtype);
const char* name_of(logitless_dtype dtype);

// Largest relative error of one rounding of a normal number: 2^-precision.
double rounding_unit(logitless_dtype dtype);
// Largest absolute error of rounding a subnormal number: half of the smallest positive one.
double subnormal_unit(logitless_dtype dtype);

// The nearest number of the format, ties to even; infinity past the largest.
double rounded(double value, logitless_dtype dtype);

double load(const void* data, logitless_dtype dtype, int64_t index);
void store(void* data, logitless_dtype dtype, int64_t index, double value);

}  // namespace logitless_test
