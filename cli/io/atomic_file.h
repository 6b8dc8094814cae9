#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace logitless::cli {

// A file written under a temporary name beside its own and renamed when it is whole. Neither an exception nor
// SIGINT, SIGTERM, SIGHUP or SIGXCPU leaves the temporary file behind. One at a time.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();  // without commit() the temporary file is removed
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> data);
  void write_le(uint64_t value, int count);
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
