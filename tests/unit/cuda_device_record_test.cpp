// Device records: text and back, errors that name the member, and where they are looked for.
#include "cuda/plan/device_record.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>

#include "core/status.h"

namespace logitless::cuda {
namespace {

DeviceRecord example() {
  DeviceRecord record;
  record.device.name = "NVIDIA A100-SXM4-80GB";
  record.device.capability = 80;
  record.device.processors = 108;
  record.device.measured = {2.6e14, 1.7e12, 0.9, {"mma", "mma", "portable"}, "r.json", ""};
  record.driver_version = 13000;
  record.library_version = "0.1.0";
  record.date = "2026-01-02";
  record.runs = {{4096, 128256, 4096, "mma", Work::kSparsified, 12.5, 7, "sparsified, mma 256x192"}};
  return record;
}

// Sets an environment variable for a scope; null unsets it.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) before_ = old;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }

 private:
  void set(const char* value) { value != nullptr ? ::setenv(name_, value, 1) : ::unsetenv(name_); }
  const char* name_;
  std::optional<std::string> before_;
};

class Records : public testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_records().empty()) GTEST_SKIP() << why_no_records();
  }
  std::string refusal(const std::string& text) {
    try {
      parse_record(text, "r.json");
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      return error.what();
    }
    return "";
  }
  // Returns the refusal of the example with one part of its text replaced.
  std::string refusal_with(const std::string& part, const std::string& other) {
    std::string text = text_of(example());
    const size_t at = text.find(part);
    EXPECT_NE(at, std::string::npos) << part;
    return refusal(text.replace(at, part.size(), other));
  }
};

TEST_F(Records, TextAndBack) {
  const DeviceRecord record = parse_record(text_of(example()), "r.json");
  EXPECT_EQ(record.device.name, example().device.name);
  EXPECT_EQ(record.device.processors, 108);
  EXPECT_EQ(record.device.measured.engines, example().device.measured.engines);
  EXPECT_EQ(record.device.measured.matmul_flops, 2.6e14);
  EXPECT_EQ(record.device.measured.source, "r.json");
  ASSERT_EQ(record.runs.size(), 1U);
  EXPECT_EQ(record.runs[0].work, Work::kSparsified);
  EXPECT_EQ(record.runs[0].median_seconds, 12.5);
  EXPECT_EQ(record.runs[0].plan, "sparsified, mma 256x192");
}

TEST_F(Records, NothingMeasuredIsAllowed) {
  DeviceRecord record = example();
  record.device.measured = {};
  record.runs.clear();
  EXPECT_EQ(parse_record(text_of(record), "").device.measured.engines[0], "");
}

TEST_F(Records, ErrorsNameTheMember) {
  EXPECT_EQ(refusal("{"), "device record r.json: expected an object, got text that is no JSON");
  EXPECT_EQ(refusal("[]"), "device record r.json: expected an object, got a list");
  EXPECT_EQ(refusal("{}"), "device record r.json: format: expected a value, got \"nothing\"");
  EXPECT_EQ(refusal_with("\"format\": 1", "\"format\": 2"),
            "device record r.json: format: expected 1, got 2");
  EXPECT_EQ(refusal_with("\"multiprocessors\": 108", "\"multiprocessors\": -1"),
            "device record r.json: device.multiprocessors: expected a count, got -1");
  EXPECT_EQ(refusal_with("\"loss\": \"mma\"", "\"loss\": \"wgmma\""),
            "device record r.json: engines.loss: expected an engine of CUDA, got \"wgmma\"");
  EXPECT_EQ(refusal_with("\"mma_share\": 0.9", "\"mma_share\": \"most\""),
            "device record r.json: rates.mma_share: expected a number from 0, got \"most\"");
  EXPECT_EQ(refusal_with("1700000000000.0", "17"),
            "device record r.json: rates.bytes_per_second: expected a number from 1000000, got 17");
  EXPECT_EQ(refusal_with("\"work\": \"sparsified\"", "\"work\": \"all\""),
            "device record r.json: runs.work: expected loss, exact or sparsified, got \"all\"");
}

TEST_F(Records, ErrorsAreShortASCII) {
  const std::string deep(size_t{1} << 20, '[');
  EXPECT_EQ(refusal("{\"format\": " + deep + std::string(deep.size(), ']') + "}"),
            "device record r.json: format: expected a count, got a list");
  const std::string text = refusal("{\"format\": \"" + std::string(100, 'x') + "\xC3\xA9\"}");
  EXPECT_LT(text.size(), 120U);
  EXPECT_EQ(refusal("{\"format\": \"\xC3\xA9\"}"),
            "device record r.json: format: expected a count, got \"\\u00e9\"");
}

TEST_F(Records, APathOfOtherBytesIsWritten) {
  DeviceRecord record = example();
  record.device.measured.source = "/\xFF/r.json";
  EXPECT_EQ(parse_record(text_of(record), "r.json").runs.size(), 1U);
}

TEST_F(Records, PathsFollowTheEnvironment) {
  const Device device = example().device;
  const Variable home("HOME", "/h"), config("XDG_CONFIG_HOME", nullptr);
  const std::string file = "/nvidia-a100-sxm4-80gb-108.json";
  {
    const Variable records("LOGITLESS_DEVICE_RECORDS", nullptr);
    EXPECT_EQ(record_path(device), "/h/.config/logitless/devices" + file);
    const Variable other("XDG_CONFIG_HOME", "/c");
    EXPECT_EQ(record_path(device), "/c/logitless/devices" + file);
    const Variable relative("XDG_CONFIG_HOME", "c");
    EXPECT_EQ(record_path(device), "/h/.config/logitless/devices" + file);
    const Variable no_home("HOME", nullptr), no_config("XDG_CONFIG_HOME", nullptr);
    EXPECT_EQ(record_path(device), "");
  }
  const Variable records("LOGITLESS_DEVICE_RECORDS", "/r");
  EXPECT_EQ(record_path(device), "/r" + file);
  const Variable none("LOGITLESS_DEVICE_RECORDS", "");
  EXPECT_EQ(record_path(device), "");
}

TEST_F(Records, ADeviceTakesItsOwnOnly) {
  const std::string folder = testing::TempDir();
  const Variable records("LOGITLESS_DEVICE_RECORDS", folder.c_str());
  Device device = example().device;
  device.measured = {};
  const std::string path = record_path(device);
  std::ofstream(path) << text_of(example());
  add_record(device);
  EXPECT_EQ(device.measured.engines[0], "mma");
  EXPECT_EQ(device.measured.source, path);
  EXPECT_EQ(device.measured.why_unreadable, "");

  Device other = example().device;
  other.measured = {};
  other.capability = 90;
  add_record(other);
  EXPECT_EQ(other.measured.source, "");

  std::ofstream(path) << "{}";
  Device broken = example().device;
  add_record(broken);
  EXPECT_EQ(broken.measured.why_unreadable,
            "device record " + path + ": format: expected a value, got \"nothing\"");

  std::filesystem::resize_file(path, (16 << 20) + 1);
  Device large = example().device;
  add_record(large);
  EXPECT_EQ(
      large.measured.why_unreadable,
      "device record " + path + ": expected a file of at most 16 MiB that can be read, got 16777217 bytes");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  Device folder_instead = example().device;
  add_record(folder_instead);
  EXPECT_EQ(
      folder_instead.measured.why_unreadable,
      "device record " + path + ": expected a file of at most 16 MiB that can be read, got Is a directory");
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace logitless::cuda
