#include "commands/units.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "options.h"

namespace logitless::cli {
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
  const auto [value, length] = leading_number(text, false);
  if (length == 0) return NAN;
  std::string_view rest = std::string_view(text).substr(length);
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  if (bytes && rest.ends_with('b')) rest.remove_suffix(1);
  if (rest.empty()) return value;
  for (const Suffix& suffix : kSuffixes) {
    if (rest == suffix.name) return value * suffix.factor;
  }
  return NAN;
}

}  // namespace

// Not by std::from_chars, which not every standard library has for floating-point numbers.
LeadingNumber leading_number(std::string_view text, bool exponent) {
  const auto digits = [&](size_t at) {
    while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
    return at;
  };
  const size_t begin = text.starts_with('-') ? 1 : 0;
  size_t end = digits(begin);
  const size_t whole = end - begin;
  if (end < text.size() && text[end] == '.') end = digits(end + 1);
  if (whole == 0 && end - begin < 2) return {NAN, 0};  // no digit, or a point alone
  if (exponent && end < text.size() && (text[end] == 'e' || text[end] == 'E')) {
    const size_t sign = end + 1 < text.size() && (text[end + 1] == '-' || text[end + 1] == '+') ? 1 : 0;
    const size_t after = digits(end + 1 + sign);
    if (after > end + 1 + sign) end = after;
  }
  return {std::strtod(std::string(text.substr(0, end)).c_str(), nullptr), end};
}

uint64_t parse_size(const std::string& option, const std::string& text) {
  const double bytes = parse_scaled(text, true);
  if (!(bytes >= 0 && bytes < 0x1p62)) {
    throw UsageError(option + ": expected a size such as 256MiB or 1GB, got '" + text + "'");
  }
  return static_cast<uint64_t>(bytes);
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

}  // namespace logitless::cli
