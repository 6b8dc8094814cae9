#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/element_type.h"
#include "io/mapped_file.h"
#include "io/tensor_view.h"

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
  std::map<std::string, std::string> metadata;
};

// Reads and checks the header of a file given as its bytes: the header lies inside the file and within the
// format's limit of 100 MB; names are unique; every size follows from dtype and shape; the tensors fill the
// rest of the file without holes or overlaps. `file` is its name in messages. Throws FileError.
SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file);

// The tensors of one .safetensors file, or of a checkpoint of several that an index file names
// (model.safetensors.index.json). Files are mapped when a tensor of theirs is first asked for.
class Safetensors {
 public:
  // A .safetensors file, an index (*.json), or a folder that holds a model.safetensors[.index.json].
  static Safetensors open(const std::string& path);

  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return file_of_.count(name) != 0; }
  // The files that the tensors are in, and the index.
  std::vector<std::string> files() const;
  // Throws FileError when there is no such tensor, naming those there are.
  TensorView tensor(const std::string& name);

 private:
  struct Shard {
    std::shared_ptr<const MappedFile> file;
    SafetensorsHeader header;
  };
  const Shard& shard(const std::string& path);

  std::string path_;
  std::map<std::string, std::string> file_of_;  // tensor name to path
  std::map<std::string, Shard> shards_;         // path to what is open
};

// The weight map of an index file's text: tensor name to file name. A file name must be a plain name beside
// the index: a path would let a checkpoint read files elsewhere. Throws FileError.
std::map<std::string, std::string> parse_safetensors_index(std::span<const std::byte> bytes,
                                                           const std::string& file);

}  // namespace logitless::cli
