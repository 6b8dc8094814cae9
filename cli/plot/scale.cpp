#include "plot/scale.h"

#include <algorithm>
#include <cmath>

#include "support/format.h"

namespace logitless::plot {
namespace {

// A step of 1, 2 or 5 (1, 2, 4 or 8 for bytes) times a power of the base, for about `wanted` ticks.
double round_step(double range, double wanted, Unit unit) {
  const double raw = range / wanted;
  if (unit == Unit::kBytes) return std::exp2(std::ceil(std::log2(raw)));
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw * (1 - 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

std::string trimmed(double value, int digits) {
  const std::string text = cli::format_number(value, digits);
  // There are exponents from 10^digits on; such values are whole numbers here.
  const bool has_exponent = text.find('e') != std::string::npos;
  return has_exponent && std::abs(value) >= 1 && std::abs(value) < 1e7 ? cli::format_fixed(value, 0) : text;
}

}  // namespace

std::string format_value(double value, Unit unit, int digits) {
  if (value == 0.0) return "0";
  const double size = std::abs(value);
  if (unit == Unit::kBytes) {
    const cli::Scaled scaled = cli::scaled_bytes(value);
    return trimmed(scaled.value, digits) + " " + scaled.unit;
  }
  if (unit == Unit::kSeconds) {
    const cli::Scaled scaled = cli::scaled_seconds(value);
    return trimmed(scaled.value, digits) + " " + scaled.unit;
  }
  if (size >= 1e9) return trimmed(value / 1e9, digits) + "G";
  if (size >= 1e6) return trimmed(value / 1e6, digits) + "M";
  if (size >= 1e4) return trimmed(value / 1e3, digits) + "k";
  if (size < 1e-3) {  // "2e-5", not "2e-05", and "1e-4" beside it
    const auto power = static_cast<int>(std::floor(std::log10(size) + 1e-12));
    return trimmed(value / std::pow(10.0, power), digits) + "e" + std::to_string(power);
  }
  return trimmed(value, digits);
}

Scale::Scale(const Axis& axis, double low, double high, double from, double to)
    : log_(axis.log), from_(from), to_(to) {
  low = axis.min.value_or(low);
  high = axis.max.value_or(high);
  if (log_) {
    fit_log(axis, low, high);
  } else {
    fit_linear(axis, low, high);
  }
}

void Scale::fit_linear(const Axis& axis, double low, double high) {
  if (!(high > low)) {  // one value: give it room
    const double room = low == 0.0 ? 1.0 : std::abs(low) * 0.5;
    if (!axis.min) low -= room;
    high = low + 2 * room;
  }
  double step = round_step(high - low, 5.0, axis.unit);
  if (axis.whole) step = std::max(step, 1.0);
  min_ = axis.min ? low : std::floor(low / step + 1e-9) * step;
  max_ = axis.max ? high : std::ceil(high / step - 1e-9) * step;
  const double first = std::ceil(min_ / step - 1e-9);
  for (double k = first; k * step <= max_ + step * 1e-9; k += 1.0) ticks_.push_back(k * step);
}

void Scale::fit_log(const Axis& axis, double low, double high) {
  const double base = axis.unit == Unit::kBytes ? 2.0 : 10.0;
  if (!(high > low)) high = low * base;
  const double decades = std::log(high / low) / std::log(base);
  // Marks a tick may have inside one power of ten, fewer over a longer range.
  std::vector<double> factors{1.0};
  if (base == 10.0 && decades < 3.0) factors = {1.0, 2.0, 5.0};
  if (base == 10.0 && decades < 1.0) factors = {1.0, 1.5, 2.0, 3.0, 5.0, 7.0};
  std::vector<double> marks;
  const double first = std::floor(std::log(low) / std::log(base)) - 1.0;
  const double last = std::ceil(std::log(high) / std::log(base)) + 1.0;
  for (double power = first; power <= last; power += 1.0) {
    for (const double factor : factors) marks.push_back(factor * std::pow(base, power));
  }
  // The axis runs from the last mark at or below the data to the first at or above.
  const double slack = 1 + 1e-9;
  min_ = marks.front();
  for (const double mark : marks) {
    if (mark <= low * slack) min_ = mark;
  }
  max_ = *std::find_if(marks.begin(), marks.end(), [&](double mark) { return mark * slack >= high; });
  if (axis.min) min_ = low;
  if (axis.max) max_ = high;
  std::erase_if(marks, [&](double mark) { return mark * slack < min_ || mark > max_ * slack; });
  const size_t stride = marks.size() / 9 + 1;
  for (size_t i = 0; i < marks.size(); i += stride) ticks_.push_back(marks[i]);
}

bool Scale::shows(double value) const {
  return std::isfinite(value) && (!log_ || value > 0.0);
}

double Scale::pixel(double value) const {
  const double place = log_ ? std::log(value / min_) / std::log(max_ / min_) : (value - min_) / (max_ - min_);
  return from_ + std::clamp(place, 0.0, 1.0) * (to_ - from_);
}

}  // namespace logitless::plot
