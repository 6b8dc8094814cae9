#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace logitless::cli {

// Progress of long work on stderr: a bar redrawn in place on a terminal, else a line every few seconds.
// Nothing is shown for work that ends within a second, nor where it is to be quiet.
class Progress {
 public:
  Progress(bool quiet, std::string label, int64_t total);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` is short text behind the bar, such as the loss so far.
  void update(int64_t done, const std::string& note = {});
  // Takes the bar off its line; the destructor does, too.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_;
  int64_t total_;
  bool enabled_;
  bool terminal_;
  size_t drawn_ = 0;  // width of the bar on the terminal; 0: there is none
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_draw_;
};

}  // namespace logitless::cli
