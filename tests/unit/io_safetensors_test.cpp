#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "io/tensor_files.h"

namespace logitless::cli {
namespace {

namespace fs = std::filesystem;

// A file of this header and `data_bytes` bytes of data.
std::string file_of(const std::string& header, size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i));
  return bytes + header + std::string(data_bytes, '\1');
}

SafetensorsHeader parse(const std::string& bytes) {
  return parse_safetensors(std::as_bytes(std::span(bytes)), bytes.size(), "f");
}

std::string error_of(const std::string& bytes) {
  try {
    parse(bytes);
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

void expect_refused(const std::string& header, size_t data_bytes, const std::string& part) {
  EXPECT_NE(error_of(file_of(header, data_bytes)).find(part), std::string::npos)
      << header << "\n  gave: " << error_of(file_of(header, data_bytes));
}

class Safetensors_ : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("logitless_io_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  fs::path folder_;
};

TEST_F(Safetensors_, ReadsTensorsAndPadding) {
  const SafetensorsHeader header = parse(file_of(
      R"({"__metadata__":{"a":"b"},"x":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
      R"("y":{"dtype":"I64","shape":[],"data_offsets":[12,20]},"z":{"dtype":"F32","shape":[0,7],"data_offsets":[20,20]}}   )",
      20));
  EXPECT_EQ(header.tensors.at("x").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header.tensors.at("y").end, 20u);
  EXPECT_EQ(header.tensors.size(), 3u);
}

TEST_F(Safetensors_, RefusesBadLengths) {
  EXPECT_NE(error_of("").find("at least 8 bytes"), std::string::npos);
  EXPECT_NE(error_of("1234567").find("at least 8 bytes"), std::string::npos);
  EXPECT_NE(error_of(std::string(8, '\xff')).find("the format allows"), std::string::npos);
  EXPECT_NE(error_of(std::string("\x40\0\0\0\0\0\0\0{}", 10)).find("truncated"), std::string::npos);
}

TEST_F(Safetensors_, RefusesBadJson) {
  expect_refused("", 0, "does not start with '{'");
  expect_refused("[]", 0, "does not start with '{'");
  expect_refused("{", 0, "not valid JSON");
  expect_refused("{} x", 0, "not valid JSON");
  expect_refused("{\"\xff\":1}", 0, "not valid JSON");
  expect_refused("{" + std::string(100000, '['), 0, "not valid JSON");
  expect_refused("{\"a\":" + std::string(100000, '['), 0, "nested deeper");
  expect_refused(
      R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
      1, "'x' twice");
  expect_refused(R"({"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, "'dtype' twice");
  // A key may come again in another object.
  EXPECT_EQ(
      error_of(file_of(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          2)),
      "");
}

TEST_F(Safetensors_, RefusesBadEntries) {
  expect_refused(R"({"x":3})", 0, "expected a JSON object");
  expect_refused(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", 1, "'dtype' is missing");
  expect_refused(R"({"x":{"dtype":"U9","shape":[1],"data_offsets":[0,1]}})", 1, "unknown dtype");
  expect_refused(R"({"x":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", 1, "unknown dtype");
  expect_refused(R"({"x":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "'shape' to be an array");
  expect_refused(R"({"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "whole number");
  expect_refused(R"({"x":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "whole number");
  expect_refused(R"({"x":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", 1,
                 "whole number");
  expect_refused(R"({"x":{"dtype":"U8","shape":[99999999999999999999999],"data_offsets":[0,1]}})", 1,
                 "whole number");
  expect_refused(R"({"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
                 "not a number of bytes");
  expect_refused(R"({"x":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "not a number of bytes");
  expect_refused(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "expected 8 bytes");
  expect_refused(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}})", 2, "expected 2 bytes");
  expect_refused(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2,3]}})", 2, "two numbers");
  expect_refused(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}})", 2,
                 "unknown key 'more'");
}

TEST_F(Safetensors_, RefusesHolesOverlapsAndWrongFileSizes) {
  const auto two = [](int begin) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[)" +
           std::to_string(begin) + "," + std::to_string(begin + 4) + "]}}";
  };
  EXPECT_EQ(error_of(file_of(two(4), 8)), "");
  expect_refused(two(5), 9, "comes after a hole");
  expect_refused(two(3), 8, "overlaps");
  expect_refused(two(0), 8, "overlaps");
  expect_refused(two(4), 7, "truncated");
  expect_refused(two(4), 9, "expected 8 bytes of data after the header, got 9");
}

TEST_F(Safetensors_, WriterGoesThroughTheReader) {
  const std::vector<uint8_t> bytes{1, 2, 3};
  const std::vector<double> doubles{0.5, -2};
  write_safetensors(path("w.safetensors"),
                    {{"bytes", ElementType::kU8, {3}, std::as_bytes(std::span(bytes))},
                     {"doubles \"quoted\"", ElementType::kF64, {2, 1}, std::as_bytes(std::span(doubles))},
                     {"empty", ElementType::kF32, {0}, {}}},
                    {{"format", "pt"}});
  const auto tensor = [&](const char* name) { return open_tensor("x", path("w.safetensors") + ":" + name); };
  const std::vector<std::byte> data = tensor("doubles \"quoted\"").read();
  EXPECT_EQ(reinterpret_cast<const double*>(data.data())[1], -2);
  EXPECT_EQ(tensor("bytes").read()[2], std::byte{3});
  EXPECT_EQ(tensor("empty").elements(), 0);
  EXPECT_THROW(tensor("none"), FileError);
}

TEST_F(Safetensors_, WriterLeavesNothingBehindOnError) {
  write("keep.safetensors", "old");
  const std::vector<float> data(4);
  const auto bytes = std::as_bytes(std::span(data));
  EXPECT_THROW(write_safetensors(path("keep.safetensors"), {{"x", ElementType::kF32, {5}, bytes}}),
               FileError);
  EXPECT_THROW(write_safetensors(path("keep.safetensors"), {{"x", ElementType::kF32, {4}, bytes},
                                                            {"x", ElementType::kF32, {4}, bytes}}),
               FileError);
  EXPECT_THROW(write_safetensors(path("none/x.safetensors"), {{"x", ElementType::kF32, {4}, bytes}}),
               FileError);
  EXPECT_THROW(write_safetensors(folder_.string(), {}), FileError);
  std::ifstream kept(path("keep.safetensors"));
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(kept), {}), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

// Processor seconds to read a header of so many tensors: the fastest of three readings.
double seconds_to_parse(int tensors) {
  std::string header = "{";
  for (int i = 0; i < tensors; ++i) {
    const std::string place = std::to_string(i);
    header += (i == 0 ? "\"layer." : ",\"layer.") + place +
              R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + place + "," + std::to_string(i + 1) + "]}";
  }
  const std::string bytes = file_of(header + "}", static_cast<size_t>(tensors));
  std::clock_t best = std::numeric_limits<std::clock_t>::max();
  for (int reading = 0; reading < 3; ++reading) {
    const std::clock_t start = std::clock();
    EXPECT_EQ(parse(bytes).tensors.size(), static_cast<size_t>(tensors));
    best = std::min(best, std::clock() - start);
  }
  return static_cast<double>(best) / CLOCKS_PER_SEC;
}

// Sixteen times the tensors take some 20 times as long. Comparing each with all others would take 256 times.
TEST_F(Safetensors_, TimeIsInProportionToTheTensors) {
  const double few = seconds_to_parse(2000);
  EXPECT_LT(seconds_to_parse(32000), 80 * few) << "2,000 tensors: " << few << " s";
}

TEST_F(Safetensors_, AnyPartOfATensorIsReadToAlignedMemory) {
  // Data begins at an odd byte of the file.
  std::string header = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  while ((header.size() + 8) % 2 == 0) header += ' ';
  write("odd.safetensors", file_of(header, 7) + '\2');
  const std::vector<std::byte> last = open_tensor("x", path("odd.safetensors:x")).read(1, 2);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(last.data()) % 4, 0u);
  EXPECT_EQ(last, (std::vector<std::byte>{std::byte{1}, std::byte{1}, std::byte{1}, std::byte{2}}));
}

}  // namespace
}  // namespace logitless::cli
