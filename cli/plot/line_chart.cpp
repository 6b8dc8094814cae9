#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "plot/frame.h"

namespace logitless::plot {
namespace {

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

bool drawable(const Axis& axis, double value) {
  return std::isfinite(value) && (!axis.log || value > 0.0);
}

void draw_series(Svg& svg, const Series& series, int color_index, const Scale& x_scale,
                 const Scale& y_scale) {
  const char* color = palette(color_index);
  std::vector<std::pair<double, double>> points;
  for (size_t i = 0; i < series.x.size(); ++i) {
    if (!x_scale.shows(series.x[i]) || !y_scale.shows(series.y[i])) continue;
    points.emplace_back(x_scale.pixel(series.x[i]), y_scale.pixel(series.y[i]));
  }
  if (series.stroke != Stroke::kPoints && points.size() > 1) {
    svg.polyline(points, {color, series.width, series.stroke == Stroke::kDashed});
  }
  // Rings, so that what is drawn below them stays visible.
  if (series.stroke == Stroke::kPoints) {
    for (const auto& [x, y] : points) svg.ring(x, y, 4, color);
  } else if (series.stroke == Stroke::kSolidWithPoints || points.size() == 1) {
    for (const auto& [x, y] : points) svg.circle(x, y, 1.2 + series.width, color);
  }
}

}  // namespace

std::string to_svg(const LineChart& chart) {
  Range x_range;
  Range y_range;
  std::vector<LegendEntry> legend;
  for (size_t s = 0; s < chart.series.size(); ++s) {
    const Series& series = chart.series[s];
    if (series.x.size() != series.y.size()) {
      throw std::invalid_argument("series '" + series.label + "': expected as many y as x values (" +
                                  std::to_string(series.x.size()) + "), got " +
                                  std::to_string(series.y.size()));
    }
    for (size_t i = 0; i < series.x.size(); ++i) {
      if (!drawable(chart.x, series.x[i]) || !drawable(chart.y, series.y[i])) continue;
      x_range.include(series.x[i]);
      y_range.include(series.y[i]);
    }
    legend.push_back(
        {series.label, series.color >= 0 ? series.color : static_cast<int>(s), series.stroke, false});
  }
  if (x_range.low > x_range.high)
    throw std::invalid_argument("chart '" + chart.title + "': no point to draw");

  Svg svg(Frame::kWidth, Frame::kHeight);
  Frame frame;
  frame.top = draw_heading(svg, chart.title, chart.subtitle, legend);
  const Scale y_scale(chart.y, y_range.low, y_range.high, Frame::kBottom, frame.top);
  const Scale x_scale(chart.x, x_range.low, x_range.high, frame.left, Frame::kRight);
  draw_y_axis(svg, frame, chart.y, y_scale);
  draw_x_axis(svg, frame, chart.x, x_scale);
  draw_base_line(svg, frame);
  for (size_t s = 0; s < chart.series.size(); ++s) {
    draw_series(svg, chart.series[s], legend[s].color, x_scale, y_scale);
  }
  return svg.document(chart.title);
}

}  // namespace logitless::plot
