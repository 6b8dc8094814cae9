#include "io/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "io/tensor.h"

namespace logitless::cli {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what, int reason) {
  throw FileError(path, what + ": " + std::strerror(reason));
}

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGXCPU};
constexpr size_t kMostBytes = size_t{1} << 28;  // below the 2 GiB that one read() or write() may take

char unfinished[PATH_MAX];  // name of the temporary file, for signal handlers
std::array<struct sigaction, kSignals.size()> handlers_before;  // what the signals did before

void remove_and_end(int signal) {
  ::unlink(unfinished);
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // the signal is blocked here, and ends the process after the return
}

// Installs the handlers while a file is written. A signal that the process was started to ignore (nohup)
// stays ignored.
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

}  // namespace

// O_NONBLOCK: opening a pipe without a writer must not wait.
InputFile::InputFile(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status {};
  if (fd_ < 0 || ::fstat(fd_, &status) != 0) fail(path_, "cannot be opened", errno);
  if (S_ISREG(status.st_mode)) {
    size_ = static_cast<uint64_t>(status.st_size);
    return;
  }
  ::close(fd_);
  throw FileError(path_, S_ISDIR(status.st_mode) ? "expected a file, got a directory"
                                                 : "expected a regular file, got a pipe, socket or device");
}

InputFile::~InputFile() {
  ::close(fd_);
}

std::vector<std::byte> InputFile::read(uint64_t offset, uint64_t count) const {
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  for (size_t done = 0; done < bytes.size();) {
    const size_t wanted = std::min(bytes.size() - done, kMostBytes);
    const ssize_t got = ::pread(fd_, bytes.data() + done, wanted, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, "cannot be read", errno);
    if (got == 0) {
      throw FileError(path_, "was cut while it was read: it had " + std::to_string(size_) +
                                 " bytes, it has " + std::to_string(offset + done));
    }
    done += static_cast<size_t>(got);
  }
  return bytes;
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
    const ssize_t written = ::write(fd_, data.data(), std::min(data.size(), kMostBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "cannot be written", errno);
    data = data.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::commit() {
  const int fd = fd_;
  fd_ = -1;
  // close() may be the first call that reports a full disk.
  const bool renamed = ::close(fd) == 0 && std::rename(temporary_.c_str(), path_.c_str()) == 0;
  const int reason = errno;
  if (!renamed) ::unlink(temporary_.c_str());
  leave_signals();
  if (!renamed) fail(path_, "cannot be written", reason);
}

}  // namespace logitless::cli
