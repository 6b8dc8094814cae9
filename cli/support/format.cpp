#include "support/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

namespace logitless::cli {
namespace {

// The decimal point is always a point, in every locale. Not every standard library has std::to_chars for
// floating-point numbers.
std::string printed(double value, int digits, std::ios_base::fmtflags format) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  stream.setf(format, std::ios_base::floatfield);
  stream << std::setprecision(digits) << value;
  return stream.str();
}

std::string two_digits(int64_t value) {
  return (value < 10 ? "0" : "") + std::to_string(value);
}

// A number in the unit in which people write it, such as KiB or ms.
struct Scaled {
  double value;
  const char* unit;
};

Scaled scaled_bytes(double bytes) {
  constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return {bytes, kUnits[unit]};
}

Scaled scaled_seconds(double seconds) {
  const double size = std::abs(seconds);
  if (size < 1e-3) return {seconds * 1e6, "us"};
  return size < 1 ? Scaled{seconds * 1e3, "ms"} : Scaled{seconds, "s"};
}

// Returns the digits after the point, for three digits in all.
int digits_of(const Scaled& scaled, double bytes) {
  return bytes < 1024 || scaled.value >= 100 ? 0 : scaled.value < 10 ? 2 : 1;
}

}  // namespace

std::string format_bytes(double bytes) {
  const Scaled scaled = scaled_bytes(bytes);
  return format_fixed(scaled.value, digits_of(scaled, bytes)) + " " + scaled.unit;
}

std::string format_budget(double bytes) {
  Scaled scaled = scaled_bytes(bytes);
  const int digits = digits_of(scaled, bytes);
  const double steps = std::pow(10, digits);
  scaled.value = std::ceil(scaled.value * steps) / steps;
  return format_fixed(scaled.value, digits) + " " + scaled.unit;
}

std::string format_seconds(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  const Scaled scaled = scaled_seconds(seconds);
  return (seconds < 100 ? format_number(scaled.value, 3) : format_fixed(scaled.value, 0)) + " " + scaled.unit;
}

std::string format_duration(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  if (total < 60) return std::to_string(total) + "s";
  if (total < 3600) return std::to_string(total / 60) + "m" + two_digits(total % 60) + "s";
  return std::to_string(total / 3600) + "h" + two_digits(total / 60 % 60) + "m";
}

std::string format_number(double value, int digits) {
  return printed(value, digits, {});
}

std::string format_fixed(double value, int digits) {
  return printed(value, digits, std::ios_base::fixed);
}

std::string format_count(int64_t value) {
  std::string text = std::to_string(value);
  for (auto place = static_cast<int64_t>(text.size()) - 3; place > (value < 0 ? 1 : 0); place -= 3) {
    text.insert(static_cast<size_t>(place), 1, ',');
  }
  return text;
}

std::string Table::text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (i == 0 ? row[i] + padding : padding + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

}  // namespace logitless::cli
