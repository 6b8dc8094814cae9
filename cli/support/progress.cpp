#include "support/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "support/format.h"

namespace logitless::cli {
namespace {

constexpr size_t kBarWidth = 24;
constexpr size_t kLeastBarWidth = 4;  // a shorter one is left out
constexpr std::chrono::milliseconds kFirstDraw{1000};
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::milliseconds kLineInterval{10000};  // into a file or pipe

// The width of a line of the terminal; its last column stays free, as some break the line when it is written.
size_t free_columns() {
  winsize size{};
  const bool is_known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return (is_known ? size.ws_col : size_t{80}) - 1;
}

// "[####....] ", empty where there is no room for it.
std::string bar_text(double fraction, size_t room) {
  const size_t width = std::min(room - std::min<size_t>(room, 3), kBarWidth);
  if (width < kLeastBarWidth) return "";
  const auto filled = static_cast<size_t>(fraction * static_cast<double>(width));
  return "[" + std::string(filled, '#') + std::string(width - filled, '.') + "] ";
}

}  // namespace

Progress::Progress(bool quiet, std::string label, int64_t total)
    : label_(std::move(label) + " "),
      total_(std::max<int64_t>(total, 1)),
      enabled_(!quiet),
      terminal_(isatty(STDERR_FILENO) == 1),
      next_draw_(start_ + (terminal_ ? kFirstDraw : kLineInterval)) {}

void Progress::update(int64_t done, const std::string& note) {
  const Clock::time_point now = Clock::now();
  if (!enabled_ || now < next_draw_) return;
  next_draw_ = now + (terminal_ ? kRedraw : kLineInterval);
  const double fraction = std::clamp(static_cast<double>(done) / static_cast<double>(total_), 0.0, 1.0);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  std::string text = std::to_string(static_cast<int>(fraction * 100)) + "%";
  text.insert(0, 4 - std::min<size_t>(text.size(), 4), ' ');
  if (fraction > 0 && fraction < 1) text += "  " + format_duration(seconds / fraction - seconds) + " left";
  if (!note.empty()) text += "  " + note;
  if (terminal_) {
    const size_t columns = free_columns(), used = label_.size() + text.size();
    text = (label_ + bar_text(fraction, columns - std::min(columns, used)) + text).substr(0, columns);
    const size_t width = text.size(), before = std::min(drawn_, columns);
    text.append(before - std::min(before, width), ' ');
    drawn_ = width;
    std::fprintf(stderr, "\r%s", text.c_str());
  } else {
    std::fprintf(stderr, "%s%s\n", label_.c_str(), text.c_str());
  }
  std::fflush(stderr);
}

void Progress::finish() {
  if (drawn_ != 0) {
    std::fprintf(stderr, "\r%*s\r", static_cast<int>(std::min(drawn_, free_columns())), "");
    std::fflush(stderr);
  }
  drawn_ = 0;
  enabled_ = false;
}

}  // namespace logitless::cli
