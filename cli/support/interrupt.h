#pragma once
#include <stdexcept>
#include <string>

namespace logitless::cli {

// From here on SIGINT, SIGTERM, SIGHUP and SIGXCPU remove the file that is being written, if there
// is one, and end the process as they always do. While a StopRequest lives, the first of them is only
// remembered. One that the process was started to ignore (nohup) stays ignored.
//
// A thread of its own waits for them, and no other thread ever takes one: libraries of matrix products point
// the stack register into their buffers for a while, where a handler's frame would overwrite what is there.
// Call it before any other thread is made, as threads inherit which signals they leave alone.
//
// A file that would pass the limit of the process (ulimit -f) is an error of the write from here on, no
// signal. A file that is cut while it is mapped ends the process with a message and exit code 1, after the
// file that is being written is removed. mapped_file_at: the name of the file that is mapped at an address,
// else empty.
void watch_for_interrupts(std::string (*mapped_file_at)(const void* address));

// An unfinished file that an interrupt is to remove. One at a time: a second is not remembered.
class UnfinishedFile {
 public:
  UnfinishedFile() = default;
  ~UnfinishedFile() { forget(); }
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;

  // Creates the file for writing; a descriptor, or -1 with errno, as when it exists.
  int create(const std::string& path);
  void forget();

 private:
  std::string path_;
};

// While it lives, the first signal is remembered, and acknowledged on stderr; the second ends the process.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  // The signal, or 0.
  int signal() const;
  bool received() const { return signal() != 0; }
};

// The work ended early because of a signal; the exit code is 128 + the signal, as shells have it.
class Interrupted : public std::runtime_error {
 public:
  Interrupted(int signal, const std::string& message) : std::runtime_error(message), signal_(signal) {}
  int exit_code() const { return 128 + signal_; }

 private:
  int signal_;
};

}  // namespace logitless::cli
