#include "io/tensor_view.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace logitless::cli {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, ElementType dtype) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  if (std::any_of(shape.begin(), shape.end(), [](int64_t extent) { return extent < 0; })) return std::nullopt;
  // An empty tensor is empty however large its other extents are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  uint64_t bits = static_cast<uint64_t>(bits_of(dtype));
  for (const int64_t extent : shape) {
    if (bits > kMax / static_cast<uint64_t>(extent)) return std::nullopt;
    bits *= static_cast<uint64_t>(extent);
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

TensorView aligned(TensorView tensor) {
  const auto size = static_cast<uintptr_t>(std::max(1, bits_of(tensor.dtype) / 8));
  if (tensor.data.empty() || reinterpret_cast<uintptr_t>(tensor.data.data()) % size == 0) return tensor;
  const std::shared_ptr<std::byte[]> copy(new std::byte[tensor.data.size()]);  // aligned for any type
  std::memcpy(copy.get(), tensor.data.data(), tensor.data.size());
  tensor.data = {copy.get(), tensor.data.size()};
  tensor.owner = copy;
  return tensor;
}

uint64_t read_le(const std::byte* data, int count) {
  uint64_t value = 0;
  for (int i = 0; i < count; ++i) value |= std::to_integer<uint64_t>(data[i]) << (8 * i);
  return value;
}

}  // namespace logitless::cli
