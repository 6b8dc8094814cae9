#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

namespace logitless {

// Numbered as logitless_dtype in the C header. No tensor has kE4M3: it is that of rounded rows (core/fp8.h).
enum class DType : int { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kI32 = 4, kI64 = 5, kE4M3 = 6 };

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kE4M3:
      return 1;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF64:
    case DType::kI64:
      return 8;
  }
  return 0;
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF64;
}

const char* dtype_name(DType dtype);

constexpr float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// Rounds to nearest even. A NaN stays a (quiet) NaN.
constexpr uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float f16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and subnormals
  return sign != 0 ? -magnitude : magnitude;
}

// Rounds to nearest even. Overflow becomes infinity, as in the hardware's conversion.
constexpr uint16_t float_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 lines the subnormal's bits up and rounds them
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// Rounds to a 16-bit dtype, as products round an operand; other dtypes leave the value as it is.
constexpr float rounded_to(DType dtype, float value) {
  if (dtype == DType::kBF16) return bf16_to_float(float_to_bf16(value));
  return dtype == DType::kF16 ? f16_to_float(float_to_f16(value)) : value;
}

double load_as_double(const void* data, DType dtype, int64_t index);
void store_from_double(void* data, DType dtype, int64_t index, double value);  // a float dtype
int64_t load_as_int64(const void* data, DType dtype, int64_t index);

}  // namespace logitless
