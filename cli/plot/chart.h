#pragma once

// Small charts as SVG text: lines over linear or logarithmic axes, and grouped bars. The output shows
// in any browser.

#include <optional>
#include <string>
#include <vector>

namespace logitless::plot {

enum class Unit {
  kNone,     // 1,000,000 is "1M" on an axis
  kBytes,    // 1048576 is "1 MiB"
  kSeconds,  // 0.001 is "1 ms"
};

struct Axis {
  std::string label;
  bool log = false;  // values that are not positive are left out
  Unit unit = Unit::kNone;
  bool whole = false;                        // counts: ticks are whole numbers
  std::optional<double> min = std::nullopt;  // else from the data
  std::optional<double> max = std::nullopt;
};

enum class Stroke { kSolid, kDashed, kPoints, kSolidWithPoints };  // kPoints: rings

struct Series {
  std::string label;  // in the legend; empty: not there
  std::vector<double> x;
  std::vector<double> y;  // as many as x; values that are not finite are left out
  Stroke stroke = Stroke::kSolid;
  double width = 2.0;  // of the line, in pixels
  int color = -1;      // index into the palette; -1: the series' own place
};

struct LineChart {
  std::string title;
  std::string subtitle;
  Axis x;
  Axis y;
  std::vector<Series> series;
};

struct BarSeries {
  std::string label;
  std::vector<double> values;  // one a category
};

struct BarChart {
  std::string title;
  std::string subtitle;
  std::vector<std::string> categories;
  Axis y;  // starts at 0 unless logarithmic
  std::vector<BarSeries> series;
};

// SVG documents. Throw std::invalid_argument when sizes do not match or nothing can be drawn.
std::string to_svg(const LineChart& chart);
std::string to_svg(const BarChart& chart);

// "512 MiB", "3.2k", "1.5 ms": a value as the axes and bars show it, to `digits` significant digits.
std::string format_value(double value, Unit unit, int digits = 3);

}  // namespace logitless::plot
