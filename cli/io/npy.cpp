#include "io/npy.h"

#include <array>
#include <optional>
#include <string_view>

#include "io/atomic_file.h"
#include "io/file_error.h"
#include "io/mapped_file.h"

namespace logitless::cli {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kPreambleBytes = 8;  // magic and version
constexpr size_t kAlignment = 64;     // of the data's beginning, as numpy writes it
constexpr size_t kMaxDimensions = 64;

struct NumpyType {
  std::string_view descr;
  ElementType type;
};
constexpr std::array<NumpyType, 13> kTypes{{
    {"<f8", ElementType::kF64},
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
    {"<c8", ElementType::kC64},
}};

// A reader of the header's text, a Python dictionary such as
// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
class HeaderText {
 public:
  HeaderText(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  [[noreturn]] void fail(const std::string& expected) const {
    throw FileError(file_, "has a malformed npy header: expected " + expected + " at " +
                               in_quotes(text_.substr(std::min(place_, text_.size()), 24)));
  }
  void skip_space() {
    while (place_ < text_.size() && (text_[place_] == ' ' || text_[place_] == '\n')) ++place_;
  }
  bool accept(std::string_view token) {
    skip_space();
    if (!text_.substr(place_).starts_with(token)) return false;
    place_ += token.size();
    return true;
  }
  void expect(std::string_view token) {
    if (!accept(token)) fail(in_quotes(token));
  }
  std::string string() {
    skip_space();
    const char mark = place_ < text_.size() ? text_[place_] : '\0';
    if (mark != '\'' && mark != '"') fail("a string");
    const size_t end = text_.find(mark, place_ + 1);
    if (end == std::string_view::npos) fail("a closing quote");
    std::string value(text_.substr(place_ + 1, end - place_ - 1));
    place_ = end + 1;
    return value;
  }
  int64_t number() {
    skip_space();
    int64_t value = 0;
    const size_t start = place_;
    for (; place_ < text_.size() && text_[place_] >= '0' && text_[place_] <= '9'; ++place_) {
      const int64_t digit = text_[place_] - '0';
      if (value > (INT64_MAX - digit) / 10) fail("a number below 2^63");
      value = value * 10 + digit;
    }
    if (place_ == start) fail("a whole number");
    accept("L");  // Python 2 wrote long integers so
    return value;
  }
  std::vector<int64_t> tuple() {
    std::vector<int64_t> values;
    expect("(");
    while (!accept(")")) {
      if (values.size() == kMaxDimensions) fail("at most 64 dimensions");
      values.push_back(number());
      if (!accept(",")) {
        expect(")");
        break;
      }
    }
    return values;
  }
  void expect_end() {
    skip_space();
    if (place_ != text_.size()) fail("the end");
  }
  char peek() {
    skip_space();
    return place_ < text_.size() ? text_[place_] : '\0';
  }

 private:
  std::string_view text_;
  const std::string& file_;
  size_t place_ = 0;
};

ElementType read_descr(const std::string& descr, const std::string& file) {
  for (const NumpyType& row : kTypes) {
    if (row.descr == descr) return row.type;
  }
  if (descr == "<V2" || descr == "|V2" || descr == "bfloat16") {
    throw FileError(file, "has dtype " + in_quotes(descr) + ": npy has no type for bf16; use safetensors");
  }
  if (descr.starts_with('>')) {
    throw FileError(file, "has dtype " + in_quotes(descr) + ": expected little-endian data, got big-endian");
  }
  throw FileError(file, "has dtype " + in_quotes(descr) + ": expected plain numbers such as '<f4' or '<i8'");
}

}  // namespace

NpyHeader parse_npy(std::span<const std::byte> bytes, const std::string& file) {
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!all.starts_with(kMagic))
    throw FileError(file, "is not an npy file: it does not start with \\x93NUMPY");
  if (all.size() < kPreambleBytes) throw FileError(file, "is truncated inside the npy header");
  const int major = static_cast<unsigned char>(all[6]);
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

  HeaderText text(all.substr(text_begin, length), file);
  std::optional<std::string> descr;
  std::optional<bool> fortran;
  std::optional<std::vector<int64_t>> shape;
  text.expect("{");
  while (!text.accept("}")) {
    const std::string key = text.string();
    text.expect(":");
    if (key == "descr" && !descr) {
      if (text.peek() == '[') throw FileError(file, "has a structured dtype: expected plain numbers");
      descr = text.string();
    } else if (key == "fortran_order" && !fortran) {
      fortran = text.accept("True");
      if (!*fortran) text.expect("False");
    } else if (key == "shape" && !shape) {
      shape = text.tuple();
    } else {
      throw FileError(file,
                      "has a malformed npy header: key " + in_quotes(key) + " is unknown or given twice");
    }
    if (!text.accept(",")) {
      text.expect("}");
      break;
    }
  }
  text.expect_end();
  if (!descr || !fortran || !shape) {
    throw FileError(file, "has a malformed npy header: expected the keys descr, fortran_order and shape");
  }

  NpyHeader header;
  header.dtype = read_descr(*descr, file);
  header.shape = *shape;
  header.data_offset = text_begin + length;
  if (*fortran && header.shape.size() > 1) {
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
  NpyHeader header = parse_npy(file->bytes(), path);
  TensorView view;
  view.name = path;
  view.dtype = header.dtype;
  view.shape = std::move(header.shape);
  view.data = file->bytes().subspan(header.data_offset);
  view.owner = file;
  return aligned(std::move(view));
}

void write_npy(const std::string& path, ElementType dtype, const std::vector<int64_t>& shape,
               std::span<const std::byte> data) {
  std::string_view descr;
  for (const NumpyType& row : kTypes) {
    if (row.type == dtype) descr = row.descr;
  }
  if (descr.empty()) {
    throw FileError(path, "npy has no type for " + std::string(name_of(dtype)) + "; use safetensors");
  }
  const auto bytes = bytes_of(shape, dtype);
  if (!bytes || *bytes != data.size()) {
    throw FileError(path, shape_text(shape) + " " + std::string(name_of(dtype)) + " does not have " +
                              std::to_string(data.size()) + " bytes");
  }
  std::string text = "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': (";
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
