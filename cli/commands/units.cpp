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

}  // namespace headroom::cli
