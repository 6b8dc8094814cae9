#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace headroom::cli {

// A whole regular file mapped read-only. Pages are read when touched, so a file may exceed memory.
class MappedFile {
 public:
  // Throws FileError for a missing or unreadable file, and for a directory, pipe or device.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  explicit MappedFile(std::string path) : path_(std::move(path)) {}

  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace headroom::cli
