#include "io/real_element.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace logitless::cli {
namespace {

template <class T>
T load(const TensorView& tensor, int64_t index) {
  T value;
  std::memcpy(&value, tensor.data.data() + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

float f16_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  float magnitude = 0;
  if (exponent == 31) {
    magnitude =
        mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else {
    const int significand = exponent == 0 ? mantissa : mantissa + 1024;
    magnitude = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint16_t float_to_f16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude == 0) return sign;                                      // it has no exponent
  if (magnitude >= 65520) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 2^16 and more
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // The unit in the last place at this magnitude, not below that of the subnormals.
  const int unit = std::max(exponent - 11, -24);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // Subnormals are `units` itself; adding 1024 units a step of the exponent is also right where rounding
  // carries.
  return static_cast<uint16_t>(sign | (static_cast<uint32_t>(unit + 24) * 1024 + units));
}

double real_element(const TensorView& tensor, int64_t index) {
  switch (tensor.dtype) {
    case ElementType::kF64:
      return load<double>(tensor, index);
    case ElementType::kF32:
      return load<float>(tensor, index);
    case ElementType::kBF16:
      return bf16_to_float(load<uint16_t>(tensor, index));
    case ElementType::kF16:
      return f16_to_float(load<uint16_t>(tensor, index));
    default:
      throw std::logic_error(tensor.name + " has no real elements");
  }
}

int64_t integer_element(const TensorView& tensor, int64_t index) {
  switch (tensor.dtype) {
    case ElementType::kI64:
      return load<int64_t>(tensor, index);
    case ElementType::kI32:
      return load<int32_t>(tensor, index);
    case ElementType::kI16:
      return load<int16_t>(tensor, index);
    case ElementType::kI8:
      return load<int8_t>(tensor, index);
    case ElementType::kU64:
      return static_cast<int64_t>(std::min(load<uint64_t>(tensor, index), static_cast<uint64_t>(INT64_MAX)));
    case ElementType::kU32:
      return load<uint32_t>(tensor, index);
    case ElementType::kU16:
      return load<uint16_t>(tensor, index);
    case ElementType::kU8:
      return load<uint8_t>(tensor, index);
    default:
      throw std::logic_error(tensor.name + " has no integer elements");
  }
}

}  // namespace logitless::cli
