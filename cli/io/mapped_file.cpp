#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>

#include "io/tensor.h"

namespace logitless::cli {
namespace {

std::mutex open_files_mutex;
std::set<const MappedFile*> open_files;

struct stat status_of(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) == 0) return status;
  throw FileError(path, std::string("cannot be examined: ") + std::strerror(errno));
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe without a writer must not wait.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) throw FileError(path, std::string("cannot be opened: ") + std::strerror(errno));
  std::shared_ptr<MappedFile> file(new MappedFile(path, fd));
  const struct stat status = status_of(fd, path);
  if (S_ISDIR(status.st_mode)) throw FileError(path, "expected a file, got a directory");
  if (!S_ISREG(status.st_mode))
    throw FileError(path, "expected a regular file, got a pipe, socket or device");
  if (status.st_size == 0) return file;  // an empty mapping is not allowed
  const auto size = static_cast<size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throw FileError(path, std::string("cannot be mapped: ") + std::strerror(errno));
  file->data_ = static_cast<const std::byte*>(address);
  file->size_ = size;
  const std::lock_guard lock(open_files_mutex);
  open_files.insert(file.get());
  return file;
}

MappedFile::~MappedFile() {
  {
    const std::lock_guard lock(open_files_mutex);
    open_files.erase(this);
  }
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  ::close(fd_);
}

void MappedFile::require_whole() const {
  const auto size = static_cast<size_t>(status_of(fd_, path_).st_size);
  if (size >= size_) return;
  throw FileError(path_, "was cut while it was read: it had " + std::to_string(size_) + " bytes, it has " +
                             std::to_string(size));
}

void require_whole_mapped_files() {
  const std::lock_guard lock(open_files_mutex);
  for (const MappedFile* file : open_files) file->require_whole();
}

std::string mapped_file_at(const void* address) {
  const std::lock_guard lock(open_files_mutex);
  for (const MappedFile* file : open_files) {
    const std::span<const std::byte> bytes = file->bytes();
    const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(bytes.data());
    if (offset < bytes.size()) return file->path();
  }
  return "";
}

}  // namespace logitless::cli
