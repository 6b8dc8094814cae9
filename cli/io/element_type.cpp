#include "io/element_type.h"

#include <array>

namespace logitless::cli {
namespace {

struct Row {
  ElementType type;
  std::string_view name;
  int bits;
};

constexpr std::array<Row, 20> kRows{{
    {ElementType::kF64, "F64", 64},       {ElementType::kF32, "F32", 32},
    {ElementType::kF16, "F16", 16},       {ElementType::kBF16, "BF16", 16},
    {ElementType::kI64, "I64", 64},       {ElementType::kI32, "I32", 32},
    {ElementType::kI16, "I16", 16},       {ElementType::kI8, "I8", 8},
    {ElementType::kU64, "U64", 64},       {ElementType::kU32, "U32", 32},
    {ElementType::kU16, "U16", 16},       {ElementType::kU8, "U8", 8},
    {ElementType::kBool, "BOOL", 8},      {ElementType::kF8E4M3, "F8_E4M3", 8},
    {ElementType::kF8E5M2, "F8_E5M2", 8}, {ElementType::kF8E8M0, "F8_E8M0", 8},
    {ElementType::kF6E2M3, "F6_E2M3", 6}, {ElementType::kF6E3M2, "F6_E3M2", 6},
    {ElementType::kF4, "F4", 4},          {ElementType::kC64, "C64", 64},
}};

// Rows stand in the enumeration's order.
constexpr bool rows_in_order() {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<size_t>(kRows[i].type) != i) return false;
  }
  return true;
}
static_assert(rows_in_order());

}  // namespace

int bits_of(ElementType type) {
  return kRows[static_cast<size_t>(type)].bits;
}

std::string_view name_of(ElementType type) {
  return kRows[static_cast<size_t>(type)].name;
}

std::optional<ElementType> element_type_from_name(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.type;
  }
  return std::nullopt;
}

bool is_integer(ElementType type) {
  return type >= ElementType::kI64 && type <= ElementType::kU8;
}

bool is_real(ElementType type) {
  return type <= ElementType::kBF16;
}

}  // namespace logitless::cli
