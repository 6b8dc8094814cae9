#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/element_type.h"

namespace logitless::cli {

// A tensor to be written: C order, little-endian, in the caller's memory.
struct TensorToWrite {
  std::string name;
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// Writes a .safetensors file. The bytes go straight from the caller's memory to a temporary file beside
// `path`, which takes its name only when it is whole; on an error it is removed and `path` is as before.
// Throws FileError, also for a tensor whose data does not fit its shape and for a name given twice.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace logitless::cli
