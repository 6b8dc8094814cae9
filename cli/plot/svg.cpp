#include "plot/svg.h"

#include <array>

#include "support/format.h"

namespace logitless::plot {
namespace {

std::string number(double value) {
  std::string result = cli::format_fixed(value, 2);
  while (result.back() == '0') result.pop_back();
  if (result.back() == '.') result.pop_back();
  return result;
}

std::string attribute(const char* name, const std::string& value) {
  return std::string(" ") + name + "=\"" + value + "\"";
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        // Control characters are not allowed in XML.
        result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return result;
}

std::string stroke(const LineStyle& style) {
  std::string text = attribute("stroke", style.color) + attribute("stroke-width", number(style.width));
  if (style.dashed) text += attribute("stroke-dasharray", "6 4");
  return text;
}

}  // namespace

Svg::Svg(double width, double height) : width_(width), height_(height) {}

void Svg::line(double x1, double y1, double x2, double y2, const LineStyle& style) {
  body_ += "<line" + attribute("x1", number(x1)) + attribute("y1", number(y1)) + attribute("x2", number(x2)) +
           attribute("y2", number(y2)) + stroke(style) + "/>\n";
}

void Svg::polyline(const std::vector<std::pair<double, double>>& points, const LineStyle& style) {
  body_ += "<polyline fill=\"none\" stroke-linejoin=\"round\" stroke-linecap=\"round\"" + stroke(style) +
           " points=\"";
  for (const auto& [x, y] : points) body_ += number(x) + "," + number(y) + " ";
  if (!points.empty()) body_.pop_back();
  body_ += "\"/>\n";
}

void Svg::rectangle(double x, double y, double width, double height, const char* fill) {
  body_ += "<rect" + attribute("x", number(x)) + attribute("y", number(y)) +
           attribute("width", number(width)) + attribute("height", number(height)) + attribute("fill", fill) +
           "/>\n";
}

void Svg::circle(double x, double y, double radius, const char* fill) {
  body_ += "<circle" + attribute("cx", number(x)) + attribute("cy", number(y)) +
           attribute("r", number(radius)) + attribute("fill", fill) + "/>\n";
}

void Svg::ring(double x, double y, double radius, const char* color) {
  body_ += "<circle" + attribute("cx", number(x)) + attribute("cy", number(y)) +
           attribute("r", number(radius)) + attribute("fill", "#ffffff") + stroke({color, 1.8}) + "/>\n";
}

void Svg::text(double x, double y, std::string_view text, const TextStyle& style) {
  body_ += "<text" + attribute("x", number(x)) + attribute("y", number(y)) +
           attribute("font-size", number(style.size)) + attribute("fill", style.color) +
           attribute("text-anchor", style.anchor);
  if (style.bold) body_ += attribute("font-weight", "600");
  if (style.rotation != 0) {
    body_ +=
        attribute("transform", "rotate(" + number(style.rotation) + " " + number(x) + " " + number(y) + ")");
  }
  body_ += ">" + escaped(text) + "</text>\n";
}

std::string Svg::document(std::string_view title) const {
  const std::string width = number(width_);
  const std::string height = number(height_);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\"" + attribute("width", width) +
         attribute("height", height) + attribute("viewBox", "0 0 " + width + " " + height) +
         " font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\" role=\"img\">\n<title>" +
         escaped(title) + "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n" + body_ +
         "</svg>\n";
}

const char* palette(int index) {
  static constexpr std::array<const char*, 7> kColors = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                         "#e69f00", "#56b4e9", "#555555"};
  return kColors[static_cast<size_t>(index) % kColors.size()];
}

double text_width(std::string_view text, double size) {
  size_t code_points = 0;
  for (const char c : text) code_points += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return 0.56 * size * static_cast<double>(code_points);
}

}  // namespace logitless::plot
