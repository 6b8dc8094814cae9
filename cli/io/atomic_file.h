#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "support/interrupt.h"

namespace logitless::cli {

// A file written under a temporary name beside its own and renamed when it is whole. Neither an exception nor
// an interrupt leaves the temporary file behind.
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
  UnfinishedFile unfinished_;
};

// A whole text file at once, in the same way.
void write_text_file(const std::string& path, const std::string& text);

}  // namespace logitless::cli
