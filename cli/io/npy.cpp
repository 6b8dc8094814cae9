#include "io/npy.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "io/atomic_file.h"
#include "io/json.h"
#include "io/mapped_file.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kPreambleBytes = 8;  // magic and version
constexpr size_t kAlignment = 64;     // of the data's beginning, as numpy writes it
constexpr int kNpyDepth = 4;

struct NumpyType {
  std::string_view descr;
  ElementType type;
};
constexpr std::array<NumpyType, 13> kTypes{{{"<f8", ElementType::kF64},
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

// The header is a Python dictionary, {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }: as JSON.
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
    throw FileError(file, "has a malformed npy header: " + std::string(error.what()).substr(file.size() + 2));
  }
}

ElementType read_descr(const json& descr, const std::string& file) {
  if (!descr.is_string()) throw FileError(file, "has a structured dtype: expected plain numbers");
  const auto& text = descr.get_ref<const std::string&>();
  for (const NumpyType& row : kTypes) {
    if (row.descr == text) return row.type;
  }
  const bool is_bf16 = text == "<V2" || text == "|V2" || text == "bfloat16";
  throw FileError(file, "has dtype " + in_quotes(text) +
                            (is_bf16                 ? ": npy has no type for bf16; use safetensors"
                             : text.starts_with('>') ? ": expected little-endian data, got big-endian"
                                                     : ": expected plain numbers such as '<f4' or '<i8'"));
}

}  // namespace

NpyHeader parse_npy(std::span<const std::byte> bytes, const std::string& file) {
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!all.starts_with(kMagic))
    throw FileError(file, "is not an npy file: it does not start with \\x93NUMPY");
  const int major = all.size() < kPreambleBytes ? 1 : static_cast<unsigned char>(all[6]);
  if (major < 1 || major > 3) {
    throw FileError(file, "has npy format version " + std::to_string(major) + ": expected 1, 2 or 3");
  }
  const size_t length_bytes = major == 1 ? 2 : 4;
  const size_t text_begin = kPreambleBytes + length_bytes;
  if (bytes.size() < text_begin) throw FileError(file, "is truncated inside the npy header");
  const uint64_t length = read_le(bytes.data() + kPreambleBytes, static_cast<int>(length_bytes));
  if (length > bytes.size() - text_begin) {
    throw FileError(file, "is truncated: its header has " + std::to_string(length) + " bytes, the file " +
                              std::to_string(bytes.size()));
  }
  const json parsed = parse_dictionary(all.substr(text_begin, length), file);
  if (!parsed.is_object() || parsed.size() != 3 || !parsed.contains("descr") || !parsed.contains("shape") ||
      !parsed.contains("fortran_order") || !parsed["fortran_order"].is_boolean() ||
      !parsed["shape"].is_array()) {
    throw FileError(file, "has a malformed npy header: expected the keys descr, fortran_order and shape");
  }
  NpyHeader header;
  header.dtype = read_descr(parsed["descr"], file);
  for (const json& extent : parsed["shape"]) {
    if (!extent.is_number_unsigned() || extent.get<uint64_t>() > INT64_MAX) {
      throw FileError(file,
                      "has a malformed npy header: expected whole numbers below 2^63 in the shape, got " +
                          in_quotes(extent.dump()));
    }
    header.shape.push_back(extent.get<int64_t>());
  }
  header.data_offset = text_begin + length;
  if (parsed["fortran_order"] == true && header.shape.size() > 1) {
    throw FileError(file, "is in Fortran order: expected C order (numpy.ascontiguousarray before saving)");
  }
  const auto expected = bytes_of(header.shape, header.dtype);
  const uint64_t got = bytes.size() - header.data_offset;
  if (!expected) throw FileError(file, "shape " + shape_text(header.shape) + " has too many elements");
  if (*expected != got) {
    throw FileError(file, "expected " + std::to_string(*expected) + " bytes of data for shape " +
                              shape_text(header.shape) + " " + std::string(name_of(header.dtype)) + ", got " +
                              std::to_string(got));
  }
  return header;
}

TensorView open_npy(const std::string& path) {
  const auto file = MappedFile::open(path);
  const NpyHeader header = parse_npy(file->bytes(), path);
  return aligned({path, path, header.dtype, header.shape, file->bytes().subspan(header.data_offset), file});
}

void write_npy(const std::string& path, ElementType dtype, const std::vector<int64_t>& shape,
               std::span<const std::byte> data) {
  const auto row =
      std::find_if(kTypes.begin(), kTypes.end(), [&](const NumpyType& known) { return known.type == dtype; });
  const auto bytes = bytes_of(shape, dtype);
  if (row == kTypes.end() || !bytes || *bytes != data.size()) {
    throw FileError(path, shape_text(shape) + " " + std::string(name_of(dtype)) + " of " +
                              std::to_string(data.size()) + " bytes is no array of npy");
  }
  std::string text = "{'descr': '" + std::string(row->descr) + "', 'fortran_order': False, 'shape': (";
  for (const int64_t extent : shape) text += std::to_string(extent) + ",";
  text += "), }";
  // Spaces and a newline fill the header up to the data's alignment.
  const size_t used = kPreambleBytes + 2 + text.size() + 1;
  text.append((kAlignment - used % kAlignment) % kAlignment, ' ');
  text += '\n';

  AtomicFile file(path);
  file.write(std::as_bytes(std::span(kMagic)));
  file.write_le(1, 2);  // version 1.0
  file.write_le(text.size(), 2);
  file.write(std::as_bytes(std::span(text)));
  file.write(data);
  file.commit();
}

}  // namespace logitless::cli
