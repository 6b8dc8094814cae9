#include <algorithm>
#include <string_view>

#include "io/file_error.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr uint64_t kLengthBytes = 8;
constexpr int kMaxDepth = 3;  // { tensor: { "shape": [ ... ] } }

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

std::map<std::string, std::string> read_metadata(const json& value, const std::string& file) {
  if (!value.is_object()) throw FileError(file, "'__metadata__': expected a JSON object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) throw FileError(file, "'__metadata__': expected a string for " + in_quotes(key));
    metadata[key] = text.get<std::string>();
  }
  return metadata;
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

  const json parsed = parse_strict_json(text, file, kMaxDepth);
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + length;
  for (const auto& [name, value] : parsed.items()) {
    if (name == "__metadata__") {
      header.metadata = read_metadata(value, file);
    } else {
      header.tensors[name] = read_entry(value, file, "tensor " + in_quotes(name));
    }
  }
  check_layout(header.tensors, bytes.size() - header.data_offset, file);
  return header;
}

std::map<std::string, std::string> parse_safetensors_index(std::span<const std::byte> bytes,
                                                           const std::string& file) {
  if (bytes.size() > kMaxHeaderBytes) {
    throw FileError(file, "is too large for an index: " + std::to_string(bytes.size()) + " bytes");
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const json parsed = parse_strict_json(text, file, kMaxDepth);
  const auto map = parsed.is_object() ? parsed.find("weight_map") : parsed.end();
  if (map == parsed.end() || !map->is_object()) {
    throw FileError(file, "is not a safetensors index: expected an object 'weight_map'");
  }
  std::map<std::string, std::string> files;
  for (const auto& [name, value] : map->items()) {
    if (!value.is_string()) throw FileError(file, "weight_map: expected a file name for " + in_quotes(name));
    const auto& target = value.get_ref<const std::string&>();
    if (target.empty() || target == "." || target == ".." ||
        target.find_first_of(std::string_view("/\\\0", 3)) != target.npos) {
      throw FileError(file, "weight_map: expected the name of a file beside the index for " +
                                in_quotes(name) + ", got " + in_quotes(target));
    }
    files[name] = target;
  }
  return files;
}

}  // namespace logitless::cli
