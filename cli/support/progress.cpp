#include "support/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "support/format.h"

namespace logitless::cli {
namespace {

constexpr std::chrono::milliseconds kFirstDraw{1000};
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::milliseconds kLineInterval{10000};  // in a file or pipe

constexpr const char* kEraseRest = "\033[K";  // erases the rest of the line

// Returns the usable width of the terminal's line. The last column stays free: some terminals break the line
// when it is written.
size_t free_columns() {
  winsize size{};
  const bool is_known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return (is_known ? size.ws_col : size_t{80}) - 1;
}

}  // namespace

Progress::Progress(bool quiet, std::string label, int64_t total)
    : label_(std::move(label)),
      total_(std::max<int64_t>(total, 1)),
      enabled_(!quiet),
      terminal_(isatty(STDERR_FILENO) == 1),
      next_draw_(start_ + (terminal_ ? kFirstDraw : kLineInterval)) {}

Progress::~Progress() {
  if (is_drawn_) std::fprintf(stderr, "\r%s", kEraseRest);
}

void Progress::update(int64_t done, const std::string& note) {
  const Clock::time_point now = Clock::now();
  if (!enabled_ || now < next_draw_) return;
  next_draw_ = now + (terminal_ ? kRedraw : kLineInterval);
  is_drawn_ = terminal_;
  const double fraction = std::clamp(static_cast<double>(done) / static_cast<double>(total_), 0.0, 1.0);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  std::string text = label_ + " " + std::to_string(static_cast<int>(fraction * 100)) + "%";
  if (fraction > 0 && fraction < 1) text += "  " + format_duration(seconds / fraction - seconds) + " left";
  if (!note.empty()) text += "  " + note;
  text = terminal_ ? "\r" + text.substr(0, free_columns()) + kEraseRest : text + "\n";
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace logitless::cli
