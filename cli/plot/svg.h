#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace logitless::plot {

struct TextStyle {
  double size = 13;
  const char* color = "#4a4a4a";
  const char* anchor = "start";  // start, middle, end
  bool bold = false;
  double rotation = 0;  // degrees around the text's own place
};

struct LineStyle {
  const char* color = "#d9d9d9";
  double width = 1.0;
  bool dashed = false;
};

// Collects the elements of one picture; coordinates in pixels from the top left.
class Svg {
 public:
  Svg(double width, double height);

  void line(double x1, double y1, double x2, double y2, const LineStyle& style);
  void polyline(const std::vector<std::pair<double, double>>& points, const LineStyle& style);
  void rectangle(double x, double y, double width, double height, const char* fill);
  void circle(double x, double y, double radius, const char* fill);
  void ring(double x, double y, double radius, const char* color);
  void text(double x, double y, std::string_view text, const TextStyle& style);

  // The whole document. `title` is what screen readers say.
  std::string document(std::string_view title) const;

 private:
  double width_;
  double height_;
  std::string body_;
};

// The colour of series `index`; readable with the common kinds of colour blindness (Okabe and Ito).
const char* palette(int index);

// Roughly how wide a text is drawn.
double text_width(std::string_view text, double size);

}  // namespace logitless::plot
