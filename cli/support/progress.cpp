#include "support/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "support/format.h"

namespace headroom::cli {
namespace {

constexpr int kBarWidth = 24;
constexpr std::chrono::milliseconds kFirstDraw{1000};
constexpr std::chrono::milliseconds kRedraw{100};
constexpr std::chrono::milliseconds kLineInterval{10000};  // into a file or pipe

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
  std::string text = label_ + " ";
  if (terminal_) {
    const auto filled = static_cast<size_t>(fraction * kBarWidth);
    text += '[';
    text.append(filled, '#').append(kBarWidth - filled, '.');
    text += "] ";
  }
  char percent[16];
  std::snprintf(percent, sizeof percent, "%3.0f%%", std::floor(fraction * 100));
  text += percent;
  if (fraction > 0 && fraction < 1) text += "  " + format_duration(seconds / fraction - seconds) + " left";
  if (!note.empty()) text += "  " + note;
  return text;
}

void Progress::update(int64_t done, const std::string& note) {
  if (!enabled_) return;
  const Clock::time_point now = Clock::now();
  if (now < next_draw_) return;
  next_draw_ = now + (terminal_ ? kRedraw : kLineInterval);
  std::string text = line(done, note, std::chrono::duration<double>(now - start_).count());
  if (terminal_) {
    const size_t width = text.size();
    if (width < last_width_) text.append(last_width_ - width, ' ');
    last_width_ = width;
    std::fprintf(stderr, "\r%s", text.c_str());
  } else {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
  std::fflush(stderr);
}

void Progress::hide() {
  if (!enabled_ || last_width_ == 0) return;
  std::fprintf(stderr, "\r%*s\r", static_cast<int>(last_width_), "");
  std::fflush(stderr);
  last_width_ = 0;
  next_draw_ = Clock::now();
}

void Progress::finish() {
  hide();
  enabled_ = false;
}

}  // namespace headroom::cli
