#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "io/tensor_files.h"

namespace logitless::cli {
namespace {

std::string file_of(int major, const std::string& header, size_t data_bytes) {
  std::string bytes = "\x93NUMPY";
  bytes += static_cast<char>(major);
  bytes += '\0';
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) bytes += static_cast<char>(header.size() >> (8 * i));
  return bytes + header + std::string(data_bytes, '\1');
}

TensorEntry parse(const std::string& bytes) {
  return parse_npy(std::as_bytes(std::span(bytes)), bytes.size(), "f");
}

void expect_refused(const std::string& bytes, const std::string& part) {
  try {
    parse(bytes);
    ADD_FAILURE() << "accepted, expected: " << part;
  } catch (const FileError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

std::string dictionary(const std::string& descr, const std::string& shape,
                       const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}

TEST(Npy, ReadsAllVersionsAndShapes) {
  for (int major = 1; major <= 3; ++major) {
    const TensorEntry header = parse(file_of(major, dictionary("<f4", "(2, 3)") + "   \n", 24));
    EXPECT_EQ(header.shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(header.dtype, ElementType::kF32);
  }
  EXPECT_EQ(parse(file_of(1, dictionary("<i8", "(1,)"), 8)).shape.size(), 1u);
  EXPECT_EQ(parse(file_of(1, dictionary("<i8", "()"), 8)).shape.size(), 0u);
  EXPECT_EQ(parse(file_of(1, dictionary("<i8", "(3, 0)"), 0)).shape.size(), 2u);
  EXPECT_EQ(parse(file_of(1, dictionary("<f2", "(5,)", "True"), 10)).dtype, ElementType::kF16);
}

TEST(Npy, RefusesWhatIsNotPlainLittleEndianCOrder) {
  expect_refused(file_of(1, dictionary(">f4", "(1,)"), 4), "big-endian");
  expect_refused(file_of(1, dictionary("<V2", "(1,)"), 2), "no type for bf16");
  expect_refused(file_of(1, dictionary("|O", "(1,)"), 8), "plain numbers");
  expect_refused(file_of(1, dictionary("<f4", "(1, 1)", "True"), 4), "Fortran order");
  expect_refused(file_of(1, "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4),
                 "structured");
}

TEST(Npy, RefusesMalformedHeaders) {
  expect_refused("", "not an npy file");
  expect_refused("\x93NUMPY", "truncated");
  expect_refused("\x93NUMPY\1", "truncated");
  expect_refused(std::string("\x93NUMPY\1\0\xff", 9), "truncated");
  expect_refused(std::string("\x93NUMPY\1\0\xff\xff{", 11), "truncated");
  expect_refused(file_of(4, "{}", 0), "version 4");
  expect_refused(file_of(1, "{}", 0), "expected the keys");
  for (const char* bad : {"", "{'descr", "{'descr': '<f4', 'descr': '<f4', }", "{,}", "[", ")"}) {
    expect_refused(file_of(1, bad, 0), "malformed npy header");
  }
  expect_refused(file_of(1, dictionary("<f4", "(1,)") + "x", 4), "malformed npy header");
  expect_refused(file_of(1, dictionary("<f4", "(1"), 4), "malformed npy header");
  expect_refused(file_of(1, dictionary("<f4", std::string(1000, '(')), 4), "nested deeper");
  for (const char* bad :
       {"(-1,)", "(1.5,)", "('1',)", "((1,),)", "(9223372036854775808,)", "(99999999999999999999,)"}) {
    expect_refused(file_of(1, dictionary("<f4", bad), 4), "whole number");
  }
  expect_refused(file_of(1, dictionary("<f4", "(4611686018427387904, 4)"), 4), "too many elements");
  expect_refused(file_of(1, dictionary("<f4", "(2,)"), 4), "expected 8 bytes");
  expect_refused(file_of(1, dictionary("<f4", "(2,)"), 12), "got 12");
}

TEST(Npy, WriterGoesThroughTheReader) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("logitless_npy_" + std::to_string(::getpid()) + ".npy"))
          .string();
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  write_npy(path, {"v", ElementType::kF32, {2, 3}, std::as_bytes(std::span(values))});
  const StoredTensor tensor = open_tensor("v", path);
  const std::vector<std::byte> data = tensor.read();
  EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(reinterpret_cast<const float*>(data.data())[5], 6);
  EXPECT_THROW(write_npy(path, {"v", ElementType::kBF16, {2}, std::as_bytes(std::span(values)).first(4)}),
               FileError);
  EXPECT_THROW(write_npy(path, {"v", ElementType::kF32, {7}, std::as_bytes(std::span(values))}), FileError);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace logitless::cli
