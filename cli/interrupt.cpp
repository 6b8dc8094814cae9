#include "interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string_view>

namespace headroom::cli {
namespace {

constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGHUP};

// All that the handler reads; it may run on any thread, at any time.
std::array<char, 4096> unfinished_path{};
std::atomic<bool> has_unfinished_file{false};
std::atomic<bool> stop_is_awaited{false};
std::atomic<int> stop_signal{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

// Calls only what POSIX allows in a handler.
void handle(int signal) {
  if (stop_is_awaited.load() && stop_signal.exchange(signal) == 0) {
    constexpr std::string_view kText = "\nstopping; a second signal (Ctrl-C) quits at once\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
    return;
  }
  if (has_unfinished_file.load()) ::unlink(unfinished_path.data());
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

void install_interrupt_handlers() {
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : kSignals) {
    struct sigaction old {};
    sigaction(signal, nullptr, &old);
    if (old.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
}

void UnfinishedFile::remember(const std::string& path) {
  if (has_unfinished_file.load() || path.size() >= unfinished_path.size()) return;
  path.copy(unfinished_path.data(), path.size());
  unfinished_path[path.size()] = '\0';
  has_unfinished_file.store(true);
  remembered_ = true;
}

void UnfinishedFile::forget() {
  if (remembered_) has_unfinished_file.store(false);
  remembered_ = false;
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

}  // namespace headroom::cli
