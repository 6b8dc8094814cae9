#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace logitless::train {

double Schedule::learning_rate(int64_t step) const {
  constexpr double kLast = 0.1;
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const int64_t from = std::max(warmup, decay_from);
  if (total <= from || step <= from) return peak;
  const double place = std::min(1.0, static_cast<double>(step - from) / static_cast<double>(total - from));
  return peak * (kLast + (1.0 - kLast) * 0.5 * (1.0 + std::cos(std::numbers::pi * place)));
}

}  // namespace logitless::train
