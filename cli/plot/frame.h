#pragma once

#include <string>
#include <vector>

#include "plot/chart.h"
#include "plot/scale.h"
#include "plot/svg.h"

namespace logitless::plot {

// The parts that all charts share. The plot area lies inside the margins.
struct Frame {
  static constexpr double kWidth = 820;
  static constexpr double kHeight = 460;
  static constexpr double kRight = kWidth - 40;
  static constexpr double kBottom = kHeight - 58;
  double left = 92;
  double top = 92;
};

struct LegendEntry {
  std::string label;
  int color;
  Stroke stroke;
  bool is_bar;
};

// Title, subtitle and, below them, the legend in one row or more. Returns the y below which the plot may
// begin.
double draw_heading(Svg& svg, const std::string& title, const std::string& subtitle,
                    const std::vector<LegendEntry>& legend);

// Grid lines, tick labels and the axis labels.
void draw_y_axis(Svg& svg, const Frame& frame, const Axis& axis, const Scale& scale);
void draw_x_axis(Svg& svg, const Frame& frame, const Axis& axis, const Scale& scale);
void draw_base_line(Svg& svg, const Frame& frame);

}  // namespace logitless::plot
