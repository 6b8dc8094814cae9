#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/tensor.h"

namespace logitless::cli {

struct NpyHeader {
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  uint64_t data_offset = 0;
};

// Reads and checks the header of a .npy file (format versions 1 to 3) given as its bytes. Little-endian
// plain numbers in C order only; everything else is refused by name. Throws FileError.
NpyHeader parse_npy(std::span<const std::byte> bytes, const std::string& file);

// The array in a .npy file, mapped.
TensorView open_npy(const std::string& path);

// Writes a version 1 file, whole or not at all. There is no npy type for BF16.
void write_npy(const std::string& path, ElementType dtype, const std::vector<int64_t>& shape,
               std::span<const std::byte> data);

}  // namespace logitless::cli
