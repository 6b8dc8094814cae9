#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace logitless::cli {

// Progress of long work on stderr: a line redrawn in place on a terminal, else one every few seconds. Work
// that ends within a second shows nothing, nor does quiet work.
class Progress {
 public:
  Progress(bool quiet, std::string label, int64_t total);
  ~Progress();  // removes the line from the terminal
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` is short text at the end, such as the loss so far.
  void update(int64_t done, const std::string& note = {});

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_;
  int64_t total_;
  bool enabled_;
  bool terminal_;
  bool is_drawn_ = false;  // whether the terminal shows the line
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_draw_;
};

}  // namespace logitless::cli
