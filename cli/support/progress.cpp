#include "support/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
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

}  // namespace

Progress::Progress(bool quiet, std::string label, int64_t total)
    : label_(std::move(label)),
      total_(std::max<int64_t>(total, 1)),
      enabled_(!quiet),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      next_draw_(start_ + (terminal_ ? kFirstDraw : kLineInterval)) {}

Progress::~Progress() {
  finish();
}

std::string Progress::line(int64_t done, const std::string& note, double seconds) const {
  const double fraction = std::clamp(static_cast<double>(done) / static_cast<double>(total_), 0.0, 1.0);
  char percent[16];
  std::snprintf(percent, sizeof percent, "%3.0f%%", std::floor(fraction * 100));
  std::string text = percent;
  if (fraction > 0 && fraction < 1) text += "  " + format_duration(seconds / fraction - seconds) + " left";
  if (!note.empty()) text += "  " + note;
  if (!terminal_) return label_ + " " + text;

  const size_t columns = free_columns(), others = label_.size() + text.size() + std::string(" [] ").size();
  const size_t bar = columns > others ? std::min(columns - others, kBarWidth) : 0;
  if (bar >= kLeastBarWidth) {
    const auto filled = static_cast<size_t>(fraction * static_cast<double>(bar));
    text = "[" + std::string(filled, '#') + std::string(bar - filled, '.') + "] " + text;
  }
  return (label_ + " " + text).substr(0, columns);
}

void Progress::update(int64_t done, const std::string& note) {
  if (!enabled_) return;
  const Clock::time_point now = Clock::now();
  if (now < next_draw_) return;
  next_draw_ = now + (terminal_ ? kRedraw : kLineInterval);
  std::string text = line(done, note, std::chrono::duration<double>(now - start_).count());
  if (terminal_) {
    const size_t width = text.size(), drawn = std::min(last_width_, free_columns());
    if (width < drawn) text.append(drawn - width, ' ');
    last_width_ = width;
    std::fprintf(stderr, "\r%s", text.c_str());
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::fflush(stderr);
}

void Progress::hide() {
  if (!enabled_ || last_width_ == 0) return;
  std::fprintf(stderr, "\r%*s\r", static_cast<int>(std::min(last_width_, free_columns())), "");
  std::fflush(stderr);
  last_width_ = 0;
  next_draw_ = Clock::now();
}

void Progress::finish() {
  hide();
  enabled_ = false;
}

}  // namespace logitless::cli
