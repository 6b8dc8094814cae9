#include "support/interrupt.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>

namespace logitless::cli {
namespace {

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGXCPU};

std::mutex unfinished_mutex;
const std::string* unfinished_path = nullptr;  // null: no file is being written
std::atomic<bool> stop_is_awaited{false};
std::atomic<int> stop_signal{0};
std::string (*name_of_mapped)(const void*) = nullptr;

sigset_t watched_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kSignals) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&set, signal);
  }
  return set;
}

// Holds the mutex to the end, so that no other file is begun.
[[noreturn]] void end_process(int signal) {
  const std::lock_guard lock(unfinished_mutex);
  if (unfinished_path != nullptr) ::unlink(unfinished_path->c_str());
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  ::raise(signal);
  ::_exit(128 + signal);  // the first process of a container is not ended by a signal
}

// A mapped file became shorter, or its device failed: a load from it raises this in the thread that loads,
// which so holds no lock and is in no allocation. Every other SIGBUS ends the process.
void on_unreadable_memory(int, siginfo_t* info, void*) {
  // Another process may have sent it, and then there is no address.
  const std::string file = info->si_code > 0 ? name_of_mapped(info->si_addr) : "";
  if (file.empty()) {
    ::signal(SIGBUS, SIG_DFL);
    ::raise(SIGBUS);  // blocked here: it ends the process after the return
    return;
  }
  const std::lock_guard lock(unfinished_mutex);  // other threads wait here
  if (unfinished_path != nullptr) ::unlink(unfinished_path->c_str());
  const std::string text =
      "\nlogitless: error: " + file + ": cannot be read any more: it was cut, or its device failed\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  ::_exit(1);
}

void wait_for_signals(sigset_t signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) == 0) {
    if (!stop_is_awaited.load() || stop_signal.exchange(signal) != 0) end_process(signal);
    constexpr std::string_view kText = "\nstopping; a second signal (Ctrl-C) quits at once\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  }
}

}  // namespace

void watch_for_interrupts(std::string (*mapped_file_at)(const void* address)) {
  ::signal(SIGXFSZ, SIG_IGN);
  name_of_mapped = mapped_file_at;
  struct sigaction action {};
  action.sa_sigaction = on_unreadable_memory;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
  const sigset_t signals = watched_signals();
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &signals, &before);
  try {
    std::thread(wait_for_signals, signals).detach();
  } catch (const std::system_error&) {  // no thread to be had: they end the process at once
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
}

int UnfinishedFile::create(const std::string& path) {
  const std::lock_guard lock(unfinished_mutex);
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd >= 0 && unfinished_path == nullptr) {
    path_ = path;
    unfinished_path = &path_;
  }
  return fd;
}

void UnfinishedFile::forget() {
  const std::lock_guard lock(unfinished_mutex);
  if (unfinished_path == &path_) unfinished_path = nullptr;
}

StopRequest::StopRequest() {
  stop_signal.store(0);
  stop_is_awaited.store(true);
}

StopRequest::~StopRequest() {
  stop_is_awaited.store(false);
}

int StopRequest::signal() const {
  return stop_signal.load();
}

}  // namespace logitless::cli
