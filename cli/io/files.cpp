#include "io/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

#include "io/tensor.h"

namespace logitless::cli {
namespace {

std::mutex open_files_mutex;
std::set<const MappedFile*> open_files;

[[noreturn]] void fail(const std::string& path, const std::string& what, int reason) {
  throw FileError(path, what + ": " + std::strerror(reason));
}

struct stat status_of(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) == 0) return status;
  fail(path, "cannot be examined", errno);
}

// The path of the open file that is mapped at an address, else empty.
std::string mapped_file_at(const void* address) {
  const std::lock_guard lock(open_files_mutex);
  for (const MappedFile* file : open_files) {
    const std::span<const std::byte> bytes = file->bytes();
    const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(bytes.data());
    if (offset < bytes.size()) return file->path();
  }
  return "";
}

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGXCPU};
// Below the 2 GiB that one write() may take.
constexpr size_t kWriteBytes = size_t{1} << 28;

char unfinished[PATH_MAX];                                      // the temporary file, for signal handlers
std::array<struct sigaction, kSignals.size()> handlers_before;  // what the signals did

void remove_and_end(int signal) {
  ::unlink(unfinished);
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // blocked here: it ends the process after the return
}

// While a file is written. A signal that the process was started to ignore (nohup) stays ignored.
void watch_signals() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = remove_and_end;
    ::sigaction(kSignals[i], nullptr, &handlers_before[i]);
    if (handlers_before[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

void leave_signals() {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &handlers_before[i], nullptr);
}

// A mapped file became shorter, or its device failed: a load from it raises this in the thread that loads,
// which so holds no lock and is in no allocation. Every other SIGBUS ends the process.
void on_unreadable_memory(int, siginfo_t* info, void*) {
  // Another process may have sent it, and then there is no address.
  const std::string file = info->si_code > 0 ? mapped_file_at(info->si_addr) : "";
  if (file.empty()) {
    ::signal(SIGBUS, SIG_DFL);
    ::raise(SIGBUS);
    return;
  }
  const std::string text =
      "\nlogitless: error: " + file + ": cannot be read any more: it was cut, or its device failed\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(1);
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe without a writer must not wait.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(path, "cannot be opened", errno);
  std::shared_ptr<MappedFile> file(new MappedFile(path, fd));
  const struct stat status = status_of(fd, path);
  if (S_ISDIR(status.st_mode)) throw FileError(path, "expected a file, got a directory");
  if (!S_ISREG(status.st_mode))
    throw FileError(path, "expected a regular file, got a pipe, socket or device");
  if (status.st_size == 0) return file;  // an empty mapping is not allowed
  const auto size = static_cast<size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) fail(path, "cannot be mapped", errno);
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

AtomicFile::AtomicFile(const std::string& path)
    : path_(path), temporary_(path + ".partial-" + std::to_string(::getpid())) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw FileError(path, "cannot be written: it exists and is not a regular file");
  }
  std::snprintf(unfinished, sizeof unfinished, "%s", temporary_.c_str());
  watch_signals();
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ >= 0) return;
  const int reason = errno;
  leave_signals();
  fail(path, "cannot be created", reason);
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
  leave_signals();
}

void AtomicFile::write(std::span<const std::byte> data) {
  while (!data.empty()) {
    const ssize_t written = ::write(fd_, data.data(), std::min(data.size(), kWriteBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "cannot be written", errno);
    data = data.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  const int fd = fd_;
  fd_ = -1;
  // close() may be the first to tell of a full disk.
  const bool renamed = ::close(fd) == 0 && std::rename(temporary_.c_str(), path_.c_str()) == 0;
  const int reason = errno;
  if (!renamed) ::unlink(temporary_.c_str());
  leave_signals();
  if (!renamed) fail(path_, "cannot be written", reason);
}

void report_unusable_files() {
  ::signal(SIGXFSZ, SIG_IGN);
  struct sigaction action {};
  action.sa_sigaction = on_unreadable_memory;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace logitless::cli
