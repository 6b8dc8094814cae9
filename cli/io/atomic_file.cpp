#include "io/atomic_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "io/file_error.h"

namespace logitless::cli {
namespace {

// Below the 2 GiB that one write() may take.
constexpr size_t kWriteBytes = size_t{1} << 28;

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw FileError(path, "cannot be written: it exists and is not a regular file");
  }
  temporary_ = path + ".partial-" + std::to_string(::getpid());
  fd_ = unfinished_.create(temporary_);
  if (fd_ < 0) throw FileError(path, std::string("cannot be created: ") + std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::write(std::span<const std::byte> data) {
  while (!data.empty()) {
    const ssize_t written = ::write(fd_, data.data(), std::min(data.size(), kWriteBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw FileError(path_, std::string("cannot be written: ") + std::strerror(errno));
    data = data.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::write_le(uint64_t value, int count) {
  std::byte bytes[8];
  for (int i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(value >> (8 * i));
  write({bytes, static_cast<size_t>(count)});
}

void AtomicFile::commit() {
  const int fd = fd_;
  fd_ = -1;
  // close() may be the first to tell of a full disk.
  const bool renamed = ::close(fd) == 0 && std::rename(temporary_.c_str(), path_.c_str()) == 0;
  const int reason = errno;
  if (!renamed) ::unlink(temporary_.c_str());
  unfinished_.forget();
  if (renamed) return;
  throw FileError(path_, std::string("cannot be written: ") + std::strerror(reason));
}

void write_text_file(const std::string& path, const std::string& text) {
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace logitless::cli
