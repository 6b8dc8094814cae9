#include "io/tensor_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string_view>

#include "io/json.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // limit of the format
constexpr uint64_t kLengthBytes = 8;
constexpr size_t kNamesShown = 8;
constexpr size_t kDataAlignment = 8;  // the format's alignment of the data's beginning
constexpr int kHeaderDepth = 3;       // { tensor: { "shape": [ ... ] } }

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kPreambleBytes = 8;               // magic and version
constexpr uint64_t kNpyStart = uint64_t{1} << 20;  // headers of plain numbers are much shorter
constexpr size_t kNpyAlignment = 64;               // numpy's alignment of the data's beginning
constexpr int kNpyDepth = 4;

struct NumpyType {
  std::string_view descr;
  ElementType type;
};
constexpr std::array<NumpyType, 13> kNumpyTypes{{{"<f8", ElementType::kF64},
                                                 {"<f4", ElementType::kF32},
                                                 {"<f2", ElementType::kF16},
                                                 {"<i8", ElementType::kI64},
                                                 {"<i4", ElementType::kI32},
                                                 {"<i2", ElementType::kI16},
                                                 {"|i1", ElementType::kI8},
                                                 {"<u8", ElementType::kU64},
                                                 {"<u4", ElementType::kU32},
                                                 {"<u2", ElementType::kU16},
                                                 {"|u1", ElementType::kU8},
                                                 {"|b1", ElementType::kBool},
                                                 {"<c8", ElementType::kC64}}};

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string described(ElementType dtype, const std::vector<int64_t>& shape) {
  return std::string(name_of(dtype)) + " " + shape_text(shape);
}

// Reads a whole number in 0 ... 2^63 - 1.
int64_t read_count(const json& value, const std::string& file, const std::string& what) {
  if (value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{INT64_MAX}) return value.get<int64_t>();
  throw FileError(file,
                  what + ": expected a whole number from 0 to 2^63 - 1, got " + in_quotes(value.dump()));
}

std::vector<int64_t> read_shape(const json& value, const std::string& file, const std::string& what) {
  if (!value.is_array()) throw FileError(file, what + ": expected 'shape' to be an array");
  std::vector<int64_t> shape;
  for (const json& extent : value) shape.push_back(read_count(extent, file, what + ", 'shape'"));
  return shape;
}

TensorEntry read_entry(const json& value, const std::string& file, const std::string& what) {
  if (!value.is_object()) throw FileError(file, what + ": expected a JSON object");
  for (const auto& [key, unused] : value.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      throw FileError(file, what + ": unknown key " + in_quotes(key));
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) throw FileError(file, what + ": '" + key + "' is missing");
  }
  TensorEntry entry;
  const json &dtype = value["dtype"], &offsets = value["data_offsets"];
  const auto type = dtype.is_string() ? element_type_from_name(dtype.get<std::string>()) : std::nullopt;
  if (!type) throw FileError(file, what + ": unknown dtype " + in_quotes(dtype.dump()));
  entry.dtype = *type;
  entry.shape = read_shape(value["shape"], file, what);
  if (!offsets.is_array() || offsets.size() != 2)
    throw FileError(file, what + ": expected 'data_offsets' to be two numbers");
  entry.begin = static_cast<uint64_t>(read_count(offsets[0], file, what + ", 'data_offsets'"));
  entry.end = static_cast<uint64_t>(read_count(offsets[1], file, what + ", 'data_offsets'"));

  const auto bytes = bytes_of(entry.shape, entry.dtype);
  const std::string tensor = described(entry.dtype, entry.shape);
  if (!bytes)
    throw FileError(file, what + ": the size of " + tensor + " is not a number of bytes below 2^60");
  if (entry.end < entry.begin || entry.end - entry.begin != *bytes) {
    throw FileError(file, what + ": expected " + std::to_string(*bytes) + " bytes for " + tensor +
                              ", got data_offsets [" + std::to_string(entry.begin) + ", " +
                              std::to_string(entry.end) + "]");
  }
  return entry;
}

// Checks that the tensors, in the order of their place, fill `size` bytes without holes or overlaps.
void check_layout(const std::map<std::string, TensorEntry>& tensors, uint64_t size, const std::string& file) {
  std::vector<std::pair<const TensorEntry*, const std::string*>> order;
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

// Parses a Python dictionary, {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }, as JSON.
json parse_dictionary(std::string_view python, const std::string& file) {
  std::string text;
  for (size_t i = 0; i < python.size(); ++i) {
    const std::string_view rest = python.substr(i);
    const char c = python[i];
    const bool closes = c == ')' || c == ']' || c == '}';
    if (closes) {  // JSON has no comma there
      const size_t last = text.find_last_not_of(" \n");
      if (last != std::string::npos && text[last] == ',') text.resize(last);
    }
    text += c == '\''                               ? '"'
            : c == '('                              ? '['
            : c == ')'                              ? ']'
            : c == 'T' && rest.starts_with("True")  ? 't'
            : c == 'F' && rest.starts_with("False") ? 'f'
                                                    : c;
  }
  try {
    return parse_strict_json(text, file, kNpyDepth);
  } catch (const FileError& error) {
    throw FileError(file, "has a malformed npy header: " + error.reason);
  }
}

ElementType read_descr(const json& descr, const std::string& file) {
  if (!descr.is_string()) throw FileError(file, "has a structured dtype: expected plain numbers");
  const auto& text = descr.get_ref<const std::string&>();
  for (const NumpyType& row : kNumpyTypes) {
    if (row.descr == text) return row.type;
  }
  const bool is_bf16 = text == "<V2" || text == "|V2" || text == "bfloat16";
  throw FileError(file, "has dtype " + in_quotes(text) +
                            (is_bf16                 ? ": npy has no type for bf16; use safetensors"
                             : text.starts_with('>') ? ": expected little-endian data, got big-endian"
                                                     : ": expected plain numbers such as '<f4' or '<i8'"));
}

// Opens the tensor of this name, or the only one if the name is empty.
StoredTensor open_safetensors(const std::string& path, const std::string& tensor, const std::string& role) {
  const auto file = std::make_shared<const InputFile>(path);
  std::vector<std::byte> start = file->read(0, std::min(file->size(), kLengthBytes));
  if (start.size() == kLengthBytes) {
    const uint64_t length = std::min(read_le(start.data(), kLengthBytes), kMaxHeaderBytes);
    start = file->read(0, std::min(file->size(), kLengthBytes + length));
  }
  const SafetensorsHeader header = parse_safetensors(start, file->size(), path);
  const auto row =
      tensor.empty() && header.tensors.size() == 1 ? header.tensors.begin() : header.tensors.find(tensor);
  if (row != header.tensors.end()) {
    const auto& [name, entry] = *row;
    return {path + ":" + name, entry.dtype, entry.shape, file, header.data_offset + entry.begin};
  }
  std::string known;
  size_t count = 0;
  for (const auto& [name, unused] : header.tensors) {
    if (count++ < kNamesShown) known += (known.empty() ? "" : ", ") + in_quotes(name);
  }
  if (count > kNamesShown) known += ", and " + std::to_string(count - kNamesShown) + " more";
  throw FileError(
      path, tensor.empty()
                ? "has " + std::to_string(count) + " tensors; name the " + role + " as " + path + ":TENSOR" +
                      (count == 0 ? "" : ", one of " + known)
                : "has no tensor " + in_quotes(tensor) + "; it has " + (count == 0 ? "none" : known));
}

uint64_t checked_bytes(const std::string& path, const TensorToWrite& tensor) {
  const auto bytes = bytes_of(tensor.shape, tensor.dtype);
  if (bytes && *bytes == tensor.data.size()) return *bytes;
  throw FileError(path, "tensor " + in_quotes(tensor.name) + ": " + described(tensor.dtype, tensor.shape) +
                            " does not have " + std::to_string(tensor.data.size()) + " bytes");
}

// Appends a little-endian number.
void append(std::string& text, uint64_t value, int count) {
  for (int i = 0; i < count; ++i) text += static_cast<char>(value >> (8 * i));
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> start, uint64_t size,
                                    const std::string& file) {
  if (start.size() < kLengthBytes) {
    throw FileError(
        file, "is not a safetensors file: expected at least 8 bytes, got " + std::to_string(start.size()));
  }
  const uint64_t length = read_le(start.data(), kLengthBytes);
  if (length > kMaxHeaderBytes) {
    throw FileError(file, "is not a safetensors file: its header would have " + std::to_string(length) +
                              " bytes, the format allows " + std::to_string(kMaxHeaderBytes));
  }
  if (length > size - kLengthBytes) {
    throw FileError(file, "is truncated: its header has " + std::to_string(length) + " bytes, the file " +
                              std::to_string(size));
  }
  // The file may have been rewritten since its length was read.
  if (length > start.size() - kLengthBytes) throw FileError(file, "was changed while it was read");
  const std::string_view text = text_of(start.subspan(kLengthBytes, length));
  if (!text.starts_with('{'))
    throw FileError(file, "is not a safetensors file: its header does not start with '{'");
  const json parsed = parse_strict_json(text, file, kHeaderDepth);
  SafetensorsHeader header;
  header.data_offset = kLengthBytes + length;
  for (const auto& [name, value] : parsed.items()) {
    if (name != "__metadata__") header.tensors[name] = read_entry(value, file, "tensor " + in_quotes(name));
  }
  check_layout(header.tensors, size - header.data_offset, file);
  return header;
}

TensorEntry parse_npy(std::span<const std::byte> start, uint64_t size, const std::string& file) {
  const std::string_view all = text_of(start);
  if (!all.starts_with(kMagic))
    throw FileError(file, "is not an npy file: it does not start with \\x93NUMPY");
  const int major = all.size() < kPreambleBytes ? 1 : static_cast<unsigned char>(all[6]);
  if (major < 1 || major > 3) {
    throw FileError(file, "has npy format version " + std::to_string(major) + ": expected 1, 2 or 3");
  }
  const size_t length_bytes = major == 1 ? 2 : 4;
  const size_t text_begin = kPreambleBytes + length_bytes;
  if (start.size() < text_begin) throw FileError(file, "is truncated inside the npy header");
  const uint64_t length = read_le(start.data() + kPreambleBytes, static_cast<int>(length_bytes));
  if (length > size - text_begin) {
    throw FileError(file, "is truncated: its header has " + std::to_string(length) + " bytes, the file " +
                              std::to_string(size));
  }
  if (length > start.size() - text_begin) throw FileError(file, "has an npy header of more than 1 MiB");
  const json parsed = parse_dictionary(all.substr(text_begin, length), file);
  if (!parsed.is_object() || parsed.size() != 3 || !parsed.contains("descr") || !parsed.contains("shape") ||
      !parsed.contains("fortran_order") || !parsed["fortran_order"].is_boolean()) {
    throw FileError(file, "has a malformed npy header: expected the keys descr, fortran_order and shape");
  }
  TensorEntry entry{read_descr(parsed["descr"], file),
                    read_shape(parsed["shape"], file, "has a malformed npy header"), text_begin + length,
                    size};
  if (parsed["fortran_order"] == true && entry.shape.size() > 1) {
    throw FileError(file, "is in Fortran order: expected C order (numpy.ascontiguousarray before saving)");
  }
  const auto expected = bytes_of(entry.shape, entry.dtype);
  if (!expected) throw FileError(file, "shape " + shape_text(entry.shape) + " has too many elements");
  if (*expected != entry.end - entry.begin) {
    throw FileError(file, "expected " + std::to_string(*expected) + " bytes of data for " +
                              described(entry.dtype, entry.shape) + ", got " +
                              std::to_string(entry.end - entry.begin));
  }
  return entry;
}

void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide elements come first, so that every tensor is aligned to its own element size.
  std::vector<const TensorToWrite*> order(tensors.size());
  std::transform(tensors.begin(), tensors.end(), order.begin(), [](const auto& tensor) { return &tensor; });
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return bits_of(a->dtype) > bits_of(b->dtype); });
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t place = 0;
  for (const TensorToWrite* tensor : order) {
    if (tensor->name == "__metadata__" || header.contains(tensor->name))
      throw FileError(path, "tensor name " + in_quotes(tensor->name) + " is reserved or given twice");
    const uint64_t end = place + checked_bytes(path, *tensor);
    header[tensor->name] = {
        {"dtype", name_of(tensor->dtype)}, {"shape", tensor->shape}, {"data_offsets", {place, end}}};
    place = end;
  }
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  text.append((kDataAlignment - text.size() % kDataAlignment) % kDataAlignment, ' ');
  std::string start;
  append(start, text.size(), kLengthBytes);
  start += text;

  AtomicFile file(path);
  file.write(std::as_bytes(std::span(start)));
  for (const TensorToWrite* tensor : order) file.write(tensor->data);
  file.commit();
}

void write_npy(const std::string& path, const TensorToWrite& array) {
  const auto row = std::find_if(kNumpyTypes.begin(), kNumpyTypes.end(),
                                [&](const NumpyType& known) { return known.type == array.dtype; });
  if (row == kNumpyTypes.end())
    throw FileError(path, "npy has no type for " + std::string(name_of(array.dtype)));
  checked_bytes(path, array);
  std::string text = "{'descr': '" + std::string(row->descr) + "', 'fortran_order': False, 'shape': (";
  for (const int64_t extent : array.shape) text += std::to_string(extent) + ",";
  text += "), }";
  // Spaces and a newline fill the header up to the data's alignment.
  const size_t used = kPreambleBytes + 2 + text.size() + 1;
  text.append((kNpyAlignment - used % kNpyAlignment) % kNpyAlignment, ' ');
  text += '\n';
  std::string header(kMagic);
  append(header, 1, 2);  // version 1.0
  append(header, text.size(), 2);
  header += text;

  AtomicFile file(path);
  file.write(std::as_bytes(std::span(header)));
  file.write(array.data);
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
  // No such file exists: the text is split behind a file name's ending, for the message that follows.
  for (const char* ending : {".safetensors:", ".npy:"}) {
    const size_t place = text.find(ending);
    if (place != std::string::npos) {
      const size_t colon = place + std::string(ending).size() - 1;
      return {text.substr(0, colon), text.substr(colon + 1)};
    }
  }
  return {text, ""};
}

int64_t StoredTensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

std::vector<std::byte> StoredTensor::read(int64_t first, int64_t last) const {
  const auto size = static_cast<uint64_t>(bits_of(dtype) / 8);
  return file->read(begin + static_cast<uint64_t>(first) * size, static_cast<uint64_t>(last - first) * size);
}

StoredTensor open_tensor(const std::string& role, const std::string& reference) {
  const auto [path, tensor] = parse_tensor_reference(reference);
  std::error_code error;
  if (path.ends_with(".npy")) {
    if (!tensor.empty())
      throw FileError(path, "an npy file has no named tensors, so ':" + tensor + "' cannot be in it");
    const auto file = std::make_shared<const InputFile>(path);
    const TensorEntry entry = parse_npy(file->read(0, std::min(file->size(), kNpyStart)), file->size(), path);
    return {path, entry.dtype, entry.shape, file, entry.begin};
  }
  if (!path.ends_with(".safetensors") && std::filesystem::exists(path, error))
    throw FileError(path, "expected a .safetensors or .npy file");
  return open_safetensors(path, tensor, role);
}

}  // namespace logitless::cli
