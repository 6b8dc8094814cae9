#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace logitless::cli {

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
  // Throws FileError where the file has been cut since: what was read of its end may have been zeros.
  void require_whole() const;

 private:
  MappedFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Calls require_whole() of all that are open.
void require_whole_mapped_files();

// The path of the open file that is mapped at an address, else empty.
std::string mapped_file_at(const void* address);

}  // namespace logitless::cli
