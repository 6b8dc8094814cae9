#include "plot/frame.h"

namespace logitless::plot {
namespace {

constexpr double kLegendSize = 13;
constexpr const char* kInk = "#222222";

void draw_legend_mark(Svg& svg, double x, double y, const LegendEntry& entry) {
  const char* color = palette(entry.color);
  if (entry.is_bar) {
    svg.rectangle(x + 4, y - 10, 12, 12, color);
    return;
  }
  if (entry.stroke != Stroke::kPoints) {
    svg.line(x, y - 4, x + 20, y - 4, {color, 2.5, entry.stroke == Stroke::kDashed});
  }
  if (entry.stroke == Stroke::kSolidWithPoints) svg.circle(x + 10, y - 4, 3.5, color);
  if (entry.stroke == Stroke::kPoints) svg.ring(x + 10, y - 4, 4, color);
}

}  // namespace

double draw_heading(Svg& svg, const std::string& title, const std::string& subtitle,
                    const std::vector<LegendEntry>& legend) {
  constexpr double kLeft = 24;
  double y = 32;
  svg.text(kLeft, y, title, {18, kInk, "start", true});
  if (!subtitle.empty()) {
    y += 21;
    svg.text(kLeft, y, subtitle, {});
  }
  double x = kLeft;
  bool first = true;
  for (const LegendEntry& entry : legend) {
    if (entry.label.empty()) continue;
    const double width = 28 + text_width(entry.label, kLegendSize) + 20;
    if (first || x + width > Frame::kRight) {
      x = kLeft;
      y += first ? 27 : 20;
      first = false;
    }
    draw_legend_mark(svg, x, y, entry);
    svg.text(x + 27, y, entry.label, {kLegendSize, kInk});
    x += width;
  }
  return y + 22;
}

void draw_y_axis(Svg& svg, const Frame& frame, const Axis& axis, const Scale& scale) {
  for (const double tick : scale.ticks()) {
    const double y = scale.pixel(tick);
    svg.line(frame.left, y, Frame::kRight, y, {});
    svg.text(frame.left - 9, y + 4, format_value(tick, axis.unit, 4), {12, "#4a4a4a", "end"});
  }
  const double middle = (frame.top + Frame::kBottom) / 2;
  svg.text(22, middle, axis.label, {13, kInk, "middle", false, -90});
}

void draw_x_axis(Svg& svg, const Frame& frame, const Axis& axis, const Scale& scale) {
  for (const double tick : scale.ticks()) {
    const double x = scale.pixel(tick);
    svg.line(x, Frame::kBottom, x, Frame::kBottom + 5, {"#888888", 1});
    svg.text(x, Frame::kBottom + 20, format_value(tick, axis.unit, 4), {12, "#4a4a4a", "middle"});
  }
  svg.text((frame.left + Frame::kRight) / 2, Frame::kHeight - 14, axis.label, {13, kInk, "middle"});
}

void draw_base_line(Svg& svg, const Frame& frame) {
  svg.line(frame.left, Frame::kBottom, Frame::kRight, Frame::kBottom, {"#888888", 1.2});
}

}  // namespace logitless::plot
