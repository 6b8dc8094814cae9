#include "io/safetensors_writer.h"

#include <algorithm>
#include <numeric>

#include "io/atomic_file.h"
#include "io/file_error.h"
#include "io/json.h"
#include "io/tensor_view.h"

namespace logitless::cli {
namespace {

constexpr size_t kDataAlignment = 8;  // of the data's beginning; the format asks for it

}  // namespace

void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide elements first, so that every tensor is aligned to its own element size.
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bits_of(tensors[a].dtype) > bits_of(tensors[b].dtype); });

  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t place = 0;
  for (const size_t i : order) {
    const TensorToWrite& tensor = tensors[i];
    const auto bytes = bytes_of(tensor.shape, tensor.dtype);
    if (!bytes || *bytes != tensor.data.size()) {
      throw FileError(path, "tensor " + in_quotes(tensor.name) + ": " + shape_text(tensor.shape) + " " +
                                std::string(name_of(tensor.dtype)) + " does not have " +
                                std::to_string(tensor.data.size()) + " bytes");
    }
    if (tensor.name == "__metadata__" || header.contains(tensor.name)) {
      throw FileError(path, "tensor name " + in_quotes(tensor.name) + " is reserved or given twice");
    }
    header[tensor.name] = {
        {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {place, place + *bytes}}};
    place += *bytes;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.append((kDataAlignment - text.size() % kDataAlignment) % kDataAlignment, ' ');

  AtomicFile file(path);
  file.write_le(text.size(), 8);
  file.write(std::as_bytes(std::span(text)));
  for (const size_t i : order) file.write(tensors[i].data);
  file.commit();
}

}  // namespace logitless::cli
