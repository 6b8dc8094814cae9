#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace logitless::cli {

// A regular file that is read in parts, so that it may be larger than memory.
class InputFile {
 public:
  // Throws FileError for a missing or unreadable file, and for a directory, pipe or device.
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  // Throws FileError if these bytes cannot be read, for example because the file was cut since.
  std::vector<std::byte> read(uint64_t offset, uint64_t count) const;

 private:
  std::string path_;
  int fd_;
  uint64_t size_ = 0;
};

// A file that is written under a temporary name beside its own and renamed when it is complete. Neither an
// exception nor SIGINT, SIGTERM, SIGHUP or SIGXCPU leaves the temporary file behind. Only one object at a
// time.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();  // without commit() the temporary file is removed
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> data);
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  int fd_ = -1;
};

}  // namespace logitless::cli
