#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "io/file_error.h"

namespace headroom::cli {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe without a writer must not wait.
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) throw FileError(path, std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) {
    throw FileError(path, std::string("cannot be examined: ") + std::strerror(errno));
  }
  if (S_ISDIR(status.st_mode)) throw FileError(path, "expected a file, got a directory");
  if (!S_ISREG(status.st_mode))
    throw FileError(path, "expected a regular file, got a pipe, socket or device");
  std::shared_ptr<MappedFile> file(new MappedFile(path));
  if (status.st_size == 0) return file;  // an empty mapping is not allowed
  const auto size = static_cast<size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) throw FileError(path, std::string("cannot be mapped: ") + std::strerror(errno));
  file->data_ = static_cast<const std::byte*>(address);
  file->size_ = size;
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace headroom::cli
