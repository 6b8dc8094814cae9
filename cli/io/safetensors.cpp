#include "io/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <string_view>

#include "io/atomic_file.h"
#include "io/json.h"
#include "io/mapped_file.h"
#include "io/npy.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr uint64_t kLengthBytes = 8;
constexpr size_t kNamesShown = 8;
constexpr size_t kDataAlignment = 8;  // of the data's beginning; the format asks for it
constexpr int kHeaderDepth = 3;       // { tensor: { "shape": [ ... ] } }

// A whole number in 0 ... 2^63 - 1.
int64_t read_count(const json& value, const std::string& file, const std::string& what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    throw FileError(file,
                    what + ": expected a whole number from 0 to 2^63 - 1, got " + in_quotes(value.dump()));
  }
  return static_cast<int64_t>(value.get<uint64_t>());
}

const json& member(const json& object, const char* key, const std::string& file, const std::string& what) {
  const auto found = object.find(key);
  if (found == object.end()) throw FileError(file, what + ": '" + key + "' is missing");
  return *found;
}

SafetensorsEntry read_entry(const json& value, const std::string& file, const std::string& what) {
  if (!value.is_object()) throw FileError(file, what + ": expected a JSON object");
  for (const auto& [key, unused] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      throw FileError(file, what + ": unknown key " + in_quotes(key));
    }
  }
  SafetensorsEntry entry;
  const json& dtype = member(value, "dtype", file, what);
  const auto type =
      dtype.is_string() ? element_type_from_name(dtype.get_ref<const std::string&>()) : std::nullopt;
  if (!type) throw FileError(file, what + ": unknown dtype " + in_quotes(dtype.dump()));
  entry.dtype = *type;

  const json& shape = member(value, "shape", file, what);
  if (!shape.is_array()) throw FileError(file, what + ": expected 'shape' to be an array");
  for (const json& extent : shape) entry.shape.push_back(read_count(extent, file, what + ", 'shape'"));

  const json& offsets = member(value, "data_offsets", file, what);
  if (!offsets.is_array() || offsets.size() != 2) {
    throw FileError(file, what + ": expected 'data_offsets' to be two numbers");
  }
  entry.begin = static_cast<uint64_t>(read_count(offsets[0], file, what + ", 'data_offsets'"));
  entry.end = static_cast<uint64_t>(read_count(offsets[1], file, what + ", 'data_offsets'"));

  const auto bytes = bytes_of(entry.shape, entry.dtype);
  const std::string described = std::string(name_of(entry.dtype)) + " " + shape_text(entry.shape);
  if (!bytes)
    throw FileError(file, what + ": the size of " + described + " is not a number of bytes below 2^60");
  if (entry.end < entry.begin || entry.end - entry.begin != *bytes) {
    throw FileError(file, what + ": expected " + std::to_string(*bytes) + " bytes for " + described +
                              ", got data_offsets [" + std::to_string(entry.begin) + ", " +
                              std::to_string(entry.end) + "]");
  }
  return entry;
}

// The tensors, in order of their place, must fill `size` bytes without holes or overlaps.
void check_layout(const std::map<std::string, SafetensorsEntry>& tensors, uint64_t size,
                  const std::string& file) {
  std::vector<std::pair<const SafetensorsEntry*, const std::string*>> order;
  order.reserve(tensors.size());
  for (const auto& [name, entry] : tensors) order.emplace_back(&entry, &name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  uint64_t place = 0;
  for (const auto& [entry, name] : order) {
    const std::string what = "tensor " + in_quotes(*name);
    if (entry->end > size) {
      throw FileError(file, what + " ends at byte " + std::to_string(entry->end) +
                                " of the data, but the file has " + std::to_string(size) +
                                ": it is truncated or its header is wrong");
    }
    if (entry->begin != place) {
      throw FileError(file,
                      what + (entry->begin < place ? " overlaps the one before it" : " comes after a hole") +
                          ": expected it to begin at byte " + std::to_string(place) + " of the data, got " +
                          std::to_string(entry->begin));
    }
    place = entry->end;
  }
  if (place != size) {
    throw FileError(file, "expected " + std::to_string(place) + " bytes of data after the header, got " +
                              std::to_string(size));
  }
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> bytes, const std::string& file) {
  if (bytes.size() < kLengthBytes) {
    throw FileError(
        file, "is not a safetensors file: expected at least 8 bytes, got " + std::to_string(bytes.size()));
  }
  const uint64_t length = read_le(bytes.data(), kLengthBytes);
  if (length > kMaxHeaderBytes) {
    throw FileError(file, "is not a safetensors file: its header would have " + std::to_string(length) +
                              " bytes, the format allows " + std::to_string(kMaxHeaderBytes));
  }
  if (length > bytes.size() - kLengthBytes) {
    throw FileError(file, "is truncated: its header has " + std::to_string(length) + " bytes, the file " +
                              std::to_string(bytes.size()));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  if (!text.starts_with('{'))
    throw FileError(file, "is not a safetensors file: its header does not start with '{'");

  const json parsed = parse_strict_json(text, file, kHeaderDepth);
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + length;
  for (const auto& [name, value] : parsed.items()) {
    if (name == "__metadata__") continue;
    header.tensors[name] = read_entry(value, file, "tensor " + in_quotes(name));
  }
  check_layout(header.tensors, bytes.size() - header.data_offset, file);
  return header;
}

TensorView open_safetensors(const std::string& path, const std::string& tensor, const std::string& role) {
  const auto file = MappedFile::open(path);
  const SafetensorsHeader header = parse_safetensors(file->bytes(), path);
  const auto entry =
      tensor.empty() && header.tensors.size() == 1 ? header.tensors.begin() : header.tensors.find(tensor);
  if (entry != header.tensors.end()) {
    const auto& [dtype, shape, begin, end] = entry->second;
    return aligned({path + ":" + entry->first, path, dtype, shape,
                    file->bytes().subspan(header.data_offset + begin, end - begin), file});
  }
  std::string known;
  size_t shown = 0;
  for (const auto& [name, unused] : header.tensors) {
    if (shown++ < kNamesShown) known += (known.empty() ? "" : ", ") + in_quotes(name);
  }
  if (shown > kNamesShown) known += ", and " + std::to_string(shown - kNamesShown) + " more";
  throw FileError(
      path, tensor.empty()
                ? "has " + std::to_string(shown) + " tensors; name the " + role + " as " + path + ":TENSOR" +
                      (shown == 0 ? "" : ", one of " + known)
                : "has no tensor " + in_quotes(tensor) + "; it has " + (shown == 0 ? "none" : known));
}

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

TensorReference parse_tensor_reference(const std::string& text) {
  std::error_code error;
  if (std::filesystem::exists(text, error)) return {text, ""};
  for (size_t colon = text.rfind(':'); colon != std::string::npos && colon > 0;
       colon = text.rfind(':', colon - 1)) {
    const std::string file = text.substr(0, colon);
    if (std::filesystem::exists(file, error)) return {file, text.substr(colon + 1)};
  }
  // Nothing exists: split where a file name's ending says so, for the message that follows.
  for (const char* ending : {".safetensors:", ".npy:"}) {
    const size_t found = text.find(ending);
    if (found != std::string::npos) {
      const size_t colon = found + std::string(ending).size() - 1;
      return {text.substr(0, colon), text.substr(colon + 1)};
    }
  }
  return {text, ""};
}

TensorView open_tensor(const std::string& role, const std::string& reference) {
  const auto [path, tensor] = parse_tensor_reference(reference);
  std::error_code error;
  if (path.ends_with(".npy")) {
    if (tensor.empty()) return open_npy(path);
    throw FileError(path, "an npy file has no named tensors, so ':" + tensor + "' cannot be in it");
  }
  if (!path.ends_with(".safetensors") && std::filesystem::exists(path, error)) {
    throw FileError(path, "expected a .safetensors or .npy file");
  }
  return open_safetensors(path, tensor, role);
}

}  // namespace logitless::cli
