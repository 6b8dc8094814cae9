#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace logitless::cli {

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
  kBool,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF6E2M3,
  kF6E3M2,
  kF4,
  kC64,
};

int bits_of(ElementType type);
// The name in a safetensors header, which is also the name shown to people.
std::string_view name_of(ElementType type);
std::optional<ElementType> element_type_from_name(std::string_view name);
bool is_integer(ElementType type);
bool is_real(ElementType type);  // F64, F32, F16 or BF16

}  // namespace logitless::cli
