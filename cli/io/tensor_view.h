#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/element_type.h"

namespace logitless::cli {

// A tensor inside a mapped file: C order, little-endian. It keeps alive what its data lies in.
struct TensorView {
  std::string name;  // "file:tensor" or "file", for messages
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
  std::shared_ptr<const void> owner;

  int64_t elements() const {
    int64_t product = 1;
    for (const int64_t extent : shape) product *= extent;
    return product;
  }
};

// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

// Bytes of a tensor; nothing for a negative extent, a product beyond 2^63 - 1, or a size in bits that does
// not fill bytes.
std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, ElementType dtype);

// The same tensor, copied into aligned memory if its data does not start at a multiple of the element size
// (files written before headers were padded). Every other tensor is returned as it is.
TensorView aligned(TensorView tensor);

// Little-endian unsigned integer of `count` bytes.
uint64_t read_le(const std::byte* data, int count);

}  // namespace logitless::cli
