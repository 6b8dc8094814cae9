#include "formats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace logitless_test {
namespace {

struct Format {
  const char* name;
  size_t size;
  int precision;     // significant bits
  int min_exponent;  // exponent of the smallest normal number
  int max_exponent;  // exponent of the largest number
};

// In the order of the enumeration.
constexpr Format kFormats[] = {{"f32", 4, 24, -126, 127}, {"bf16", 2, 8, -126, 127},
                               {"f16", 2, 11, -14, 15},   {"f64", 8, 53, -1022, 1023},
                               {"i32", 4, 31, 0, 30},     {"i64", 8, 63, 0, 62}};
const Format& format_of(logitless_dtype dtype) {
  return kFormats[dtype - LOGITLESS_F32];
}

// 2 to the exponent of a normal number. Numbers are rounded all the time, and std::ldexp is slow.
double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// A 16-bit format has its sign first, then the exponent, then the fraction. The exponent's bias is the
// largest exponent.
double decode(uint16_t bits, const Format& format) {
  const int fraction = format.precision - 1, most = (1 << (15 - fraction)) - 1;
  const int exponent = (bits >> fraction) & most, stored = bits & ((1 << fraction) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == most) return stored != 0 ? NAN : sign * INFINITY;
  const int mantissa = stored + (exponent > 0 ? 1 << fraction : 0);
  return sign * mantissa * power_of_two(std::max(exponent, 1) - format.max_exponent - fraction);
}

uint16_t encode(double value, const Format& format) {
  const int fraction = format.precision - 1, most = (1 << (15 - fraction)) - 1;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | most << fraction | 1 << (fraction - 1));
  if (std::isinf(value)) return static_cast<uint16_t>(sign | most << fraction);
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  // The first bit of a normal number adds one to the exponent.
  const int mantissa = static_cast<int>(std::fabs(value) * power_of_two(fraction - exponent));
  return static_cast<uint16_t>(sign | (((exponent + format.max_exponent - 1) << fraction) + mantissa));
}

// Calls f with a number of the type in memory.
template <class F>
auto with_type(logitless_dtype dtype, const F& f) {
  if (dtype == LOGITLESS_F32) return f(float{});
  if (dtype == LOGITLESS_F64) return f(double{});
  if (dtype == LOGITLESS_I32) return f(int32_t{});
  if (dtype == LOGITLESS_I64) return f(int64_t{});
  return f(uint16_t{});
}

}  // namespace

size_t size_of(logitless_dtype dtype) {
  return format_of(dtype).size;
}

const char* name_of(logitless_dtype dtype) {
  return format_of(dtype).name;
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
  const double result = std::nearbyint(value * power_of_two(-last_bit)) * power_of_two(last_bit);
  const double largest = (2 - power_of_two(1 - format.precision)) * power_of_two(format.max_exponent);
  return std::fabs(result) > largest ? std::copysign(INFINITY, value) : result;
}

// Copies bytes, because buffers are at most aligned to their elements.
double load(const void* data, logitless_dtype dtype, int64_t index) {
  return with_type(dtype, [&](auto value) {
    std::memcpy(&value, static_cast<const char*>(data) + static_cast<size_t>(index) * sizeof value,
                sizeof value);
    if constexpr (std::is_same_v<decltype(value), uint16_t>) return decode(value, format_of(dtype));
    return static_cast<double>(value);
  });
}

void store(void* data, logitless_dtype dtype, int64_t index, double number) {
  with_type(dtype, [&](auto value) {
    if constexpr (std::is_same_v<decltype(value), uint16_t>) {
      value = encode(rounded(number, dtype), format_of(dtype));
    } else {
      value = static_cast<decltype(value)>(number);
    }
    std::memcpy(static_cast<char*>(data) + static_cast<size_t>(index) * sizeof value, &value, sizeof value);
  });
}

}  // namespace logitless_test
