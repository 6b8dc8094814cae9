// Reads any bytes as a tensor file. A reader either refuses them with FileError, or finds tensors that lie
// inside the file.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "io/tensor_files.h"

namespace {

using namespace logitless::cli;

void require(bool condition) {
  if (!condition) std::abort();
}

// Reads every byte of a tensor.
void touch(std::span<const std::byte> bytes) {
  volatile unsigned sum = 0;
  for (const std::byte byte : bytes) sum = sum + std::to_integer<unsigned>(byte);
}

template <class Read>
void accept_or_refuse(const Read& read) {
  try {
    read();
  } catch (const FileError& error) {
    require(error.what()[0] != '\0');
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  accept_or_refuse([&] {
    const SafetensorsHeader header = parse_safetensors(bytes, size, "file");
    uint64_t total = 0;
    for (const auto& [name, entry] : header.tensors) {
      require(bytes_of(entry.shape, entry.dtype) == entry.end - entry.begin);
      touch(bytes.subspan(header.data_offset + entry.begin, entry.end - entry.begin));
      total += entry.end - entry.begin;
    }
    require(header.data_offset + total == size);
  });
  accept_or_refuse([&] {
    const TensorEntry entry = parse_npy(bytes, size, "file");
    require(bytes_of(entry.shape, entry.dtype) == size - entry.begin && entry.end == size);
    touch(bytes.subspan(entry.begin));
  });
  return 0;
}
