#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "plot/frame.h"

namespace logitless::plot {
namespace {

void check(const BarChart& chart) {
  if (chart.categories.empty() || chart.series.empty()) {
    throw std::invalid_argument("chart '" + chart.title + "': no bar to draw");
  }
  for (const BarSeries& series : chart.series) {
    if (series.values.size() != chart.categories.size()) {
      throw std::invalid_argument("series '" + series.label + "': expected one value a category (" +
                                  std::to_string(chart.categories.size()) + "), got " +
                                  std::to_string(series.values.size()));
    }
  }
}

// The range that the tops of the bars span.
std::pair<double, double> range_of(const BarChart& chart) {
  double low = HUGE_VAL;
  double high = 0.0;
  for (size_t c = 0; c < chart.categories.size(); ++c) {
    for (const BarSeries& series : chart.series) {
      const double value = series.values[c];
      if (!std::isfinite(value) || value < 0.0) continue;
      high = std::max(high, value);
      if (value > 0.0) low = std::min(low, value);
    }
  }
  if (high <= 0.0) return {1.0, 1.0};
  return {low, high};
}

struct Slot {
  double left;
  double width;
};

void draw_bars(Svg& svg, const BarChart& chart, size_t category, const Slot& slot, const Scale& scale) {
  const auto count = static_cast<double>(chart.series.size());
  const double width = std::min(slot.width / count, 80.0);
  double x = slot.left + (slot.width - width * count) / 2;
  for (size_t s = 0; s < chart.series.size(); ++s, x += width) {
    const double value = chart.series[s].values[category];
    if (!scale.shows(value) || value < 0.0) {
      svg.text(x + width / 2, Frame::kBottom - 6, "n/a", {11, "#888888", "middle"});
      continue;
    }
    const double top = scale.pixel(value);
    svg.rectangle(x + 1.5, top, width - 3, Frame::kBottom - top, palette(static_cast<int>(s)));
    const std::string label = format_value(value, chart.y.unit);
    const double size = text_width(label, 12) > width ? 9.5 : 12;
    svg.text(x + width / 2, top - 6, label, {size, "#222222", "middle"});
  }
}

}  // namespace

std::string to_svg(const BarChart& chart) {
  check(chart);
  std::vector<LegendEntry> legend;
  for (size_t s = 0; s < chart.series.size(); ++s) {
    legend.push_back({chart.series[s].label, static_cast<int>(s), Stroke::kSolid, true});
  }
  Svg svg(Frame::kWidth, Frame::kHeight);
  Frame frame;
  frame.top = draw_heading(svg, chart.title, chart.subtitle, legend) + 8;
  Axis axis = chart.y;
  if (!axis.log && !axis.min) axis.min = 0.0;
  const auto [low, high] = range_of(chart);
  if (axis.log && !axis.min) axis.min = low / 2;  // the smallest bar is to be seen
  const Scale scale(axis, low, high, Frame::kBottom, frame.top);
  draw_y_axis(svg, frame, axis, scale);

  const auto count = static_cast<double>(chart.categories.size());
  const double stride = (Frame::kRight - frame.left) / count;
  for (size_t c = 0; c < chart.categories.size(); ++c) {
    const double left = frame.left + stride * static_cast<double>(c);
    const Slot slot{left + stride * 0.1, stride * 0.8};
    draw_bars(svg, chart, c, slot, scale);
    const double size = text_width(chart.categories[c], 13) > stride ? 10.5 : 13;
    svg.text(left + stride / 2, Frame::kBottom + 20, chart.categories[c], {size, "#222222", "middle"});
  }
  draw_base_line(svg, frame);
  return svg.document(chart.title);
}

}  // namespace logitless::plot
