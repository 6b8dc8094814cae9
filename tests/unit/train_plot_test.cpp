// Charts: documents that hold what they should, and refuse what cannot be drawn.

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "plot/chart.h"
#include "plot/scale.h"

namespace logitless::plot {
namespace {

size_t count(const std::string& text, const std::string& what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

TEST(Plot, FormatsValues) {
  EXPECT_EQ(format_value(0, Unit::kBytes), "0");
  EXPECT_EQ(format_value(512.0 * 1024 * 1024, Unit::kBytes), "512 MiB");
  EXPECT_EQ(format_value(1.5 * 1024, Unit::kBytes), "1.5 KiB");
  EXPECT_EQ(format_value(0.0015, Unit::kSeconds), "1.5 ms");
  EXPECT_EQ(format_value(2500000, Unit::kNone), "2.5M");
  EXPECT_EQ(format_value(1e-4, Unit::kNone), "1e-4");
  EXPECT_EQ(format_value(0.00025, Unit::kNone), "2.5e-4");
  EXPECT_EQ(format_value(1023.9 * 1024 * 1024, Unit::kBytes), "1024 MiB");
}

TEST(Plot, LineChartDrawsEachSeriesAndEscapesText) {
  LineChart chart;
  chart.title = "a < b & c";
  chart.series.push_back({"one", {1, 2, 3}, {3, NAN, 1}});
  chart.series.push_back({"two", {1, 2}, {2, 2}, Stroke::kPoints});
  const std::string svg = to_svg(chart);
  EXPECT_NE(svg.find("a &lt; b &amp; c"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(count(svg, "<polyline"), 1U);
  EXPECT_EQ(count(svg, "<circle"), 3U);  // two points and the legend's
}

TEST(Plot, RefusesWhatCannotBeDrawn) {
  LineChart lines;
  EXPECT_THROW(to_svg(lines), std::invalid_argument);
  lines.series.push_back({"one", {1, 2}, {1}});
  EXPECT_THROW(to_svg(lines), std::invalid_argument);
  lines.series = {{"one", {1}, {-1}}};
  lines.y.log = true;
  EXPECT_THROW(to_svg(lines), std::invalid_argument);
  BarChart bars;
  EXPECT_THROW(to_svg(bars), std::invalid_argument);
  bars.categories = {"a", "b"};
  bars.series = {{"one", {1}}};
  EXPECT_THROW(to_svg(bars), std::invalid_argument);
  bars.series = {{"one", {1, 2}}};
  EXPECT_NE(to_svg(bars).find("</svg>"), std::string::npos);
}

TEST(Plot, ScalesHoldTheirData) {
  for (const bool log : {false, true}) {
    for (const Unit unit : {Unit::kNone, Unit::kBytes}) {
      for (const double low : {1e-9, 0.3, 7.0, 1e6}) {
        for (const double ratio : {1.0, 1.01, 3.0, 1e4, 1e9}) {
          Axis axis;
          axis.log = log;
          axis.unit = unit;
          const Scale scale(axis, low, low * ratio, 0.0, 100.0);
          EXPECT_GE(scale.ticks().size(), 1U) << low << " " << ratio << log;
          EXPECT_LE(scale.ticks().size(), 14U) << low << " " << ratio << log;
          EXPECT_LE(scale.pixel(low), scale.pixel(low * ratio) + 1e-9);
          for (const double tick : scale.ticks()) {
            EXPECT_GE(scale.pixel(tick), 0.0);
            EXPECT_LE(scale.pixel(tick), 100.0);
          }
        }
      }
    }
  }
}

TEST(Plot, CountsHaveWholeTicks) {
  for (const double high : {1.0, 2.0, 3.0, 8.0, 14.0, 1000.0}) {
    Axis axis;
    axis.whole = true;
    const Scale scale(axis, 1.0, high, 0.0, 100.0);
    for (const double tick : scale.ticks()) EXPECT_EQ(tick, std::round(tick)) << high;
  }
}

}  // namespace
}  // namespace logitless::plot
