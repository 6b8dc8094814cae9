#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/tensor.h"

namespace logitless::cli {

struct SafetensorsEntry {
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // offsets from the end of the header
  uint64_t end = 0;
};

struct SafetensorsHeader {
  uint64_t data_offset = 0;  // where the tensors' bytes begin in the file
  std::map<std::string, SafetensorsEntry> tensors;
};

// Reads and checks the header of a file given as its bytes: the header lies inside the file and within the
// format's limit of 100 MB; names are unique; every size follows from dtype and shape; the tensors fill the
// rest of the file without holes or overlaps. `file` is its name in messages. Throws FileError.
SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

// A tensor of a .safetensors file, mapped; without a name the only one. Throws FileError, which names those
// there are; role: of the argument, for that.
TensorView open_safetensors(const std::string& path, const std::string& tensor, const std::string& role);

// A tensor to be written: C order, little-endian, in the caller's memory.
struct TensorToWrite {
  std::string name;
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// Writes a .safetensors file, whole or not at all. Throws FileError, also for a tensor whose data does not
// fit its shape and for a name given twice.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// FILE[:TENSOR] as the user gives it. A file name may contain colons: the longest name that exists is the
// file's.
struct TensorReference {
  std::string file;
  std::string tensor;  // may be empty
};
TensorReference parse_tensor_reference(const std::string& text);

// Opens a tensor of a .safetensors or .npy file. `role` names the argument in messages.
TensorView open_tensor(const std::string& role, const std::string& reference);

}  // namespace logitless::cli
