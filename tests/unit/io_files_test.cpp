#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "io/files.h"
#include "io/tensor_files.h"

namespace logitless::cli {
namespace {

namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("logitless_files_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::vector<std::string>& tensors) const {
    const float value = 1;
    std::vector<TensorToWrite> list;
    for (const std::string& tensor : tensors) {
      list.push_back({tensor, ElementType::kF32, {1}, std::as_bytes(std::span(&value, 1))});
    }
    write_safetensors(path(name), list);
  }
  fs::path folder_;
};

TEST_F(Files, InputFileHandlesEmptyMissingFolderAndPipe) {
  std::ofstream(path("empty")).flush();
  EXPECT_EQ(InputFile(path("empty")).size(), 0u);
  EXPECT_THROW(InputFile(path("missing")), FileError);
  EXPECT_THROW(InputFile(folder_.string()), FileError);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(InputFile(path("pipe")), FileError);
  EXPECT_THROW(InputFile("/dev/zero"), FileError);
}

TEST_F(Files, AFileCutSinceIsAnError) {
  std::ofstream(path("full")) << "abc";
  const InputFile file(path("full"));
  fs::resize_file(path("full"), 2);
  EXPECT_EQ(file.read(1, 1), std::vector<std::byte>{std::byte{'b'}});
  EXPECT_THROW(file.read(1, 2), FileError);
}

TEST_F(Files, ReferencesSplitAtTheFileThatExists) {
  write("a.safetensors", {"x"});
  write("a.safetensors:b.safetensors", {"y"});
  EXPECT_EQ(parse_tensor_reference(path("a.safetensors")).tensor, "");
  EXPECT_EQ(parse_tensor_reference(path("a.safetensors:x:1")).tensor, "x:1");
  EXPECT_EQ(parse_tensor_reference(path("a.safetensors:b.safetensors")).tensor, "");
  EXPECT_EQ(parse_tensor_reference(path("a.safetensors:b.safetensors:y")).tensor, "y");
  EXPECT_EQ(parse_tensor_reference("gone.safetensors:w").file, "gone.safetensors");
  EXPECT_EQ(parse_tensor_reference("gone").file, "gone");
}

TEST_F(Files, TheOnlyTensorNeedsNoNameAndNoneIsGuessed) {
  write("one.safetensors", {"x"});
  write("two.safetensors", {"x", "lm_head.weight"});
  EXPECT_EQ(open_tensor("weight", path("one.safetensors")).name, path("one.safetensors") + ":x");
  EXPECT_EQ(open_tensor("weight", path("two.safetensors:x")).file->path(), path("two.safetensors"));
  std::ofstream(path("text.txt")) << "abc";
  const float value = 2;
  write_npy(path("v.npy"), {"v", ElementType::kF32, {1}, std::as_bytes(std::span(&value, 1))});
  EXPECT_EQ(open_tensor("hidden", path("v.npy")).elements(), 1);
  for (const char* bad :
       {"two.safetensors", "two.safetensors:none", "missing.safetensors:x", "", "text.txt", "v.npy:x"})
    EXPECT_THROW(open_tensor("weight", path(bad)), FileError) << bad;
}

}  // namespace
}  // namespace logitless::cli
