#include "io/tensor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace logitless::cli {
namespace {

struct Row {
  std::string_view name;
  int bits;
};
// In the order of ElementType.
constexpr std::array<Row, 20> kRows{
    {{"F64", 64},    {"F32", 32},    {"F16", 16},    {"BF16", 16},   {"I64", 64}, {"I32", 32}, {"I16", 16},
     {"I8", 8},      {"U64", 64},    {"U32", 32},    {"U16", 16},    {"U8", 8},   {"BOOL", 8}, {"F8_E4M3", 8},
     {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},   {"C64", 64}}};

// std::bit_cast, which the standard library of the planner page's compiler lacks.
template <class To, class From>
To cast_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
T load(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxLength = 120;
  std::string out = "'";
  for (const char c : text.substr(0, kMaxLength)) {
    const auto byte = static_cast<unsigned char>(c);
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\x%02x", byte);
    out += byte < 0x20 || byte == 0x7f ? std::string(escape) : std::string(1, c);
  }
  return out + (text.size() > kMaxLength ? "...'" : "'");
}

int bits_of(ElementType type) {
  return kRows[static_cast<size_t>(type)].bits;
}

std::string_view name_of(ElementType type) {
  return kRows[static_cast<size_t>(type)].name;
}

std::optional<ElementType> element_type_from_name(std::string_view name) {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].name == name) return static_cast<ElementType>(i);
  }
  return std::nullopt;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, ElementType dtype) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  if (std::any_of(shape.begin(), shape.end(), [](int64_t extent) { return extent < 0; })) return std::nullopt;
  // An empty tensor is empty, however large its other extents are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  uint64_t bits = static_cast<uint64_t>(bits_of(dtype));
  for (const int64_t extent : shape) {
    if (bits > kMax / static_cast<uint64_t>(extent)) return std::nullopt;
    bits *= static_cast<uint64_t>(extent);
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

uint64_t read_le(const std::byte* data, int count) {
  uint64_t value = 0;
  for (int i = 0; i < count; ++i) value |= std::to_integer<uint64_t>(data[i]) << (8 * i);
  return value;
}

double real_element(const std::byte* data, ElementType type, int64_t index) {
  switch (type) {
    case ElementType::kF64:
      return load<double>(data, index);
    case ElementType::kF32:
      return load<float>(data, index);
    case ElementType::kBF16:
      return bf16_to_float(load<uint16_t>(data, index));
    case ElementType::kF16:
      return f16_to_float(load<uint16_t>(data, index));
    default:
      throw std::logic_error("no real elements: " + std::string(name_of(type)));
  }
}

int64_t integer_element(const std::byte* data, ElementType type, int64_t index) {
  if (!is_integer(type)) throw std::logic_error("no integer elements: " + std::string(name_of(type)));
  const int bits = bits_of(type);
  const uint64_t value = read_le(data + index * (bits / 8), bits / 8);
  if (type >= ElementType::kU64) return static_cast<int64_t>(std::min<uint64_t>(value, INT64_MAX));
  return static_cast<int64_t>(value << (64 - bits)) >> (64 - bits);  // extends the sign
}

float bf16_to_float(uint16_t bits) {
  return cast_bits<float>(uint32_t{bits} << 16);
}

float f16_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const int significand = exponent == 0 ? mantissa : mantissa + 1024;
  float magnitude = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 25);
  if (exponent == 31) magnitude = mantissa == 0 ? HUGE_VALF : NAN;
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t float_to_bf16(float value) {
  const auto bits = cast_bits<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

uint16_t float_to_f16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude == 0) return sign;                                      // 0 has no exponent
  if (magnitude >= 65520) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 2^16 and more
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // The unit in the last place at this magnitude, which is at least that of the subnormals.
  const int unit = std::max(exponent - 11, -24);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
  // For subnormals the result is `units` itself. Adding 1024 units for each step of the exponent is right
  // even if rounding carries.
  return static_cast<uint16_t>(sign | (static_cast<uint32_t>(unit + 24) * 1024 + units));
}

}  // namespace logitless::cli
