#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::cli {

// A failure to read, write or understand a file. The message begins with the file's name.
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& file, const std::string& why)
      : std::runtime_error(file + ": " + why), reason(why) {}

  std::string reason;
};

// Quotes text from a file for a message: shortened, and without control characters.
std::string in_quotes(std::string_view text);

// Element types that a tensor file can name. Only some can be computed with. But a checkpoint may hold any of
// them beside the wanted tensors, so names and sizes of all are known.
enum class ElementType : int {
  kF64,
  kF32,
  kF16,
  kBF16,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,  // clang-format off
  kF8E4M3, kF8E5M2, kF8E8M0, kF6E2M3, kF6E3M2, kF4, kC64  // clang-format on
};

int bits_of(ElementType type);
// Returns the name in a safetensors header, which is also the name in messages.
std::string_view name_of(ElementType type);
std::optional<ElementType> element_type_from_name(std::string_view name);
inline bool is_real(ElementType type) {
  return type <= ElementType::kBF16;
}
inline bool is_integer(ElementType type) {
  return type >= ElementType::kI64 && type <= ElementType::kU8;
}

// Returns "[2, 3]".
std::string shape_text(const std::vector<int64_t>& shape);

// Returns the bytes of a tensor; no value for a negative extent, a product beyond 2^63 - 1, or a size in bits
// that does not fill bytes.
std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, ElementType dtype);

// Reads a little-endian unsigned integer of `count` bytes.
uint64_t read_le(const std::byte* data, int count);

// Returns an element of real numbers (is_real) exactly. It is slow: for weights, not matrices.
double real_element(const std::byte* data, ElementType type, int64_t index);
// Returns an element of integers (is_integer). A U64 beyond 2^63 - 1 becomes 2^63 - 1.
int64_t integer_element(const std::byte* data, ElementType type, int64_t index);

// Conversions of the 16-bit formats. Widening is exact; narrowing rounds to nearest even.
float bf16_to_float(uint16_t bits);
float f16_to_float(uint16_t bits);
uint16_t float_to_bf16(float value);
uint16_t float_to_f16(float value);

}  // namespace logitless::cli
