#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>

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

// A file written under a temporary name beside its own and renamed when it is whole. Neither an exception nor
// SIGINT, SIGTERM, SIGHUP or SIGXCPU leaves the temporary file behind. One at a time.
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

// A file that would pass the limit of the process (ulimit -f) is an error of the write from here on, no
// signal. A file that is cut while it is mapped ends the process with a message and exit code 1.
void report_unusable_files();

}  // namespace logitless::cli
