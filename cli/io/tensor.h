#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::cli {

// A file cannot be read, written or understood. The message begins with the file's name.
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& file, const std::string& why)
      : std::runtime_error(file + ": " + why), reason(why) {}

  std::string reason;
};

// Text out of a file in quotes, fit for a message: short, and without control characters.
std::string in_quotes(std::string_view text);

// Element types a tensor file can name. Only some can be computed with, but a checkpoint may hold any of
// them beside the tensors that are wanted, so all are known by name and size.
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
// The name in a safetensors header, which is also the name shown to people.
std::string_view name_of(ElementType type);
std::optional<ElementType> element_type_from_name(std::string_view name);
inline bool is_real(ElementType type) {
  return type <= ElementType::kBF16;
}
inline bool is_integer(ElementType type) {
  return type >= ElementType::kI64 && type <= ElementType::kU8;
}

// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

// Bytes of a tensor; nothing for a negative extent, a product beyond 2^63 - 1, or a size in bits that does
// not fill bytes.
std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, ElementType dtype);

// Little-endian unsigned integer of `count` bytes.
uint64_t read_le(const std::byte* data, int count);

// An element of real numbers (is_real), exactly. For small tensors: weights, not matrices.
double real_element(const std::byte* data, ElementType type, int64_t index);
// An element of integers (is_integer). A U64 beyond 2^63 - 1 becomes 2^63 - 1.
int64_t integer_element(const std::byte* data, ElementType type, int64_t index);

// The 16-bit formats. Widening is exact; narrowing rounds to nearest even.
float bf16_to_float(uint16_t bits);
float f16_to_float(uint16_t bits);
uint16_t float_to_bf16(float value);
uint16_t float_to_f16(float value);

}  // namespace logitless::cli
