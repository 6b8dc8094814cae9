#include "io/atomic_file.h"

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

#include "io/mapped_file.h"
#include "io/tensor.h"

namespace logitless::cli {
namespace {

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGXCPU};
// Below the 2 GiB that one write() may take.
constexpr size_t kWriteBytes = size_t{1} << 28;

char unfinished[PATH_MAX];                             // the temporary file, for signal handlers
std::array<struct sigaction, kSignals.size()> before;  // what the signals did

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
    ::sigaction(kSignals[i], nullptr, &before[i]);
    if (before[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

void leave_signals() {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
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
  throw FileError(path, std::string("cannot be created: ") + std::strerror(reason));
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
  leave_signals();
  if (!renamed) throw FileError(path_, std::string("cannot be written: ") + std::strerror(reason));
}

void report_unusable_files() {
  ::signal(SIGXFSZ, SIG_IGN);
  struct sigaction action {};
  action.sa_sigaction = on_unreadable_memory;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace logitless::cli
