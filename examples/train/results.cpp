#include "train/results.h"

#include <algorithm>

namespace logitless::train {

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double median_step_seconds(const std::vector<double>& seconds) {
  if (seconds.size() < 2) return median(seconds);
  return median({seconds.begin() + 1, seconds.end()});
}

}  // namespace logitless::train
