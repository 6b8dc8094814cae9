#include "formats.h"

#include <cmath>
#include <cstring>

namespace logitless_test {
namespace {

struct Format {
  const char* name;
  size_t size;
  int precision;     // significant bits
  int min_exponent;  // of the smallest normal number
  int max_exponent;  // of the largest number
};

const Format& format_of(logitless_dtype dtype) {
  static const Format kF32{"f32", 4, 24, -126, 127}, kBF16{"bf16", 2, 8, -126, 127},
      kF16{"f16", 2, 11, -14, 15}, kF64{"f64", 8, 53, -1022, 1023}, kI32{"i32", 4, 31, 0, 30},
      kI64{"i64", 8, 63, 0, 62};
  switch (dtype) {
    case LOGITLESS_F32:
      return kF32;
    case LOGITLESS_BF16:
      return kBF16;
    case LOGITLESS_F16:
      return kF16;
    case LOGITLESS_F64:
      return kF64;
    case LOGITLESS_I32:
      return kI32;
    case LOGITLESS_I64:
      return kI64;
  }
  return kF64;
}

// A 16-bit format of `fraction` stored bits after sign and exponent, `bias` of the exponent.
double decode(uint16_t bits, int fraction, int bias) {
  const int exponent_mask = (1 << (15 - fraction)) - 1;
  const int exponent = (bits >> fraction) & exponent_mask;
  const int mantissa = bits & ((1 << fraction) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == exponent_mask) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - fraction);
  return sign * std::ldexp(mantissa + (1 << fraction), exponent - bias - fraction);
}

uint16_t encode(double value, int fraction, int bias) {
  const int exponent_mask = (1 << (15 - fraction)) - 1;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value))
    return static_cast<uint16_t>(sign | (exponent_mask << fraction) | 1 << (fraction - 1));
  if (std::isinf(value)) return static_cast<uint16_t>(sign | (exponent_mask << fraction));
  if (magnitude < std::ldexp(1.0, 1 - bias)) {
    return static_cast<uint16_t>(sign | static_cast<int>(std::ldexp(magnitude, bias + fraction - 1)));
  }
  const int exponent = std::ilogb(magnitude);
  const int mantissa = static_cast<int>(std::ldexp(magnitude, fraction - exponent)) - (1 << fraction);
  return static_cast<uint16_t>(sign | ((exponent + bias) << fraction) | mantissa);
}

template <class T>
T read(const void* data, int64_t index) {
  T value;  // by bytes: buffers are aligned to their elements at most
  std::memcpy(&value, static_cast<const char*>(data) + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void write(void* data, int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + static_cast<size_t>(index) * sizeof(T), &value, sizeof(T));
}

}  // namespace

size_t size_of(logitless_dtype dtype) {
  return format_of(dtype).size;
}

const char* name_of(logitless_dtype dtype) {
  return format_of(dtype).name;
}

int precision(logitless_dtype dtype) {
  return format_of(dtype).precision;
}

double rounding_unit(logitless_dtype dtype) {
  return std::ldexp(1.0, -format_of(dtype).precision);
}

double subnormal_unit(logitless_dtype dtype) {
  const Format& format = format_of(dtype);
  return std::ldexp(1.0, format.min_exponent - format.precision);
}

double rounded(double value, logitless_dtype dtype) {
  const Format& format = format_of(dtype);
  if (dtype == LOGITLESS_F64 || value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const int last_bit = exponent - (format.precision - 1);
  const double result = std::ldexp(std::nearbyint(std::ldexp(value, -last_bit)), last_bit);
  const double largest = std::ldexp(2 - std::ldexp(1.0, 1 - format.precision), format.max_exponent);
  return std::fabs(result) > largest ? std::copysign(INFINITY, value) : result;
}

double load(const void* data, logitless_dtype dtype, int64_t index) {
  switch (dtype) {
    case LOGITLESS_F32:
      return read<float>(data, index);
    case LOGITLESS_BF16:
      return decode(read<uint16_t>(data, index), 7, 127);
    case LOGITLESS_F16:
      return decode(read<uint16_t>(data, index), 10, 15);
    case LOGITLESS_F64:
      return read<double>(data, index);
    case LOGITLESS_I32:
      return read<int32_t>(data, index);
    case LOGITLESS_I64:
      return static_cast<double>(read<int64_t>(data, index));
  }
  return 0;
}

void store(void* data, logitless_dtype dtype, int64_t index, double value) {
  switch (dtype) {
    case LOGITLESS_F32:
      return write(data, index, static_cast<float>(value));
    case LOGITLESS_BF16:
      return write(data, index, encode(rounded(value, dtype), 7, 127));
    case LOGITLESS_F16:
      return write(data, index, encode(rounded(value, dtype), 10, 15));
    case LOGITLESS_F64:
      return write(data, index, value);
    case LOGITLESS_I32:
      return write(data, index, static_cast<int32_t>(value));
    case LOGITLESS_I64:
      return write(data, index, static_cast<int64_t>(value));
  }
}

}  // namespace logitless_test
