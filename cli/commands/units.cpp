#include "commands/units.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "options.h"

namespace headroom::cli {
namespace {

struct Suffix {
  std::string_view name;
  double factor;
};
constexpr std::array<Suffix, 8> kSuffixes{{{"ki", 0x1p10},
                                           {"mi", 0x1p20},
                                           {"gi", 0x1p30},
                                           {"ti", 0x1p40},
                                           {"k", 1e3},
                                           {"m", 1e6},
                                           {"g", 1e9},
                                           {"t", 1e12}}};

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// A number and what follows it; nothing readable gives NaN.
double parse_scaled(std::string text, bool bytes) {
  text = lower(text);
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc{}) return NAN;
  std::string_view rest(end, static_cast<size_t>(text.data() + text.size() - end));
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  if (bytes && rest.ends_with('b')) rest.remove_suffix(1);
  if (rest.empty()) return value;
  for (const Suffix& suffix : kSuffixes) {
    if (rest == suffix.name) return value * suffix.factor;
  }
  return NAN;
}

std::string printed(const char* format, double value, const char* unit) {
  char text[64];
  std::snprintf(text, sizeof text, format, value, unit);
  return text;
}

}  // namespace

size_t parse_size(const std::string& option, const std::string& text) {
  const double bytes = parse_scaled(text, true);
  if (!(bytes >= 0 && bytes < 0x1p62)) {
    throw UsageError(option + ": expected a size such as 256MiB, 1GB or 0, got '" + text + "'");
  }
  return static_cast<size_t>(bytes);
}

int64_t parse_count(const std::string& option, const std::string& text) {
  const double count = parse_scaled(text, false);
  if (!(count >= 0 && count <= 0x1p53 && count == std::floor(count))) {
    throw UsageError(option + ": expected a whole number such as 4096 or 128Ki, got '" + text + "'");
  }
  return static_cast<int64_t>(count);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string format_bytes(double bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return printed(unit == 0     ? "%.0f %s"
                 : bytes < 10  ? "%.2f %s"
                 : bytes < 100 ? "%.1f %s"
                               : "%.0f %s",
                 bytes, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  if (seconds < 1e-3) return printed("%.3g %s", seconds * 1e6, "us");
  if (seconds < 1) return printed("%.3g %s", seconds * 1e3, "ms");
  return printed(seconds < 100 ? "%.3g %s" : "%.0f %s", seconds, "s");
}

std::string format_number(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

std::string format_fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string format_count(int64_t value) {
  std::string text = std::to_string(value);
  for (auto place = static_cast<int64_t>(text.size()) - 3; place > (value < 0 ? 1 : 0); place -= 3) {
    text.insert(static_cast<size_t>(place), 1, ',');
  }
  return text;
}

std::string Table::text(int indent) const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line(static_cast<size_t>(indent), ' ');
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (i == 0 ? row[i] + padding : padding + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

}  // namespace headroom::cli
