#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/files.h"
#include "io/tensor.h"

namespace logitless::cli {

// A tensor of a file. Its bytes are at [begin, end), which count from the file's beginning in an npy file,
// and from the end of the header in a safetensors file.
struct TensorEntry {
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct SafetensorsHeader {
  uint64_t data_offset = 0;  // where the tensors' bytes begin in the file
  std::map<std::string, TensorEntry> tensors;
};

// Reads and checks the header of a file of `size` bytes that begins with `start`. The header must lie inside
// the file and within the format's limit of 100 MB. Names must be unique, every size must follow from dtype
// and shape, and the tensors must fill the rest of the file without holes or overlaps. `file` is its name in
// messages. Throws FileError.
SafetensorsHeader parse_safetensors(std::span<const std::byte> start, uint64_t size, const std::string& file);

// Reads and checks the header of an .npy file (format versions 1 to 3), as parse_safetensors() does. It takes
// little-endian plain numbers in C order; anything else is an error that names it.
TensorEntry parse_npy(std::span<const std::byte> start, uint64_t size, const std::string& file);

// A tensor to be written, in C order, little-endian and in the caller's memory.
struct TensorToWrite {
  std::string name;
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// Write a file, whole or not at all. Throw FileError, also if a tensor's data does not fit its shape, if a
// name is given twice, and for a BF16 array, for which npy has no type.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata = {});
void write_npy(const std::string& path, const TensorToWrite& array);

// FILE[:TENSOR] as the user gives it. A file name may contain colons: the longest name of an existing file is
// the file's.
struct TensorReference {
  std::string file;
  std::string tensor;  // may be empty
};
TensorReference parse_tensor_reference(const std::string& text);

// A tensor in a file, in C order and little-endian.
struct StoredTensor {
  std::string name;  // "file:tensor" or "file", for messages
  ElementType dtype = ElementType::kF32;
  std::vector<int64_t> shape;
  std::shared_ptr<const InputFile> file;
  uint64_t begin = 0;  // place in the file

  int64_t elements() const;
  // Reads the elements from `first` to `last` into memory that is aligned for them.
  std::vector<std::byte> read(int64_t first, int64_t last) const;
  std::vector<std::byte> read() const { return read(0, elements()); }
};

// Opens a tensor of a .safetensors or .npy file. Without a name the file must have only one; otherwise
// FileError lists the names. `role` names the argument in messages.
StoredTensor open_tensor(const std::string& role, const std::string& reference);

}  // namespace logitless::cli
