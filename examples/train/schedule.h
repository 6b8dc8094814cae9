#pragma once

#include <cstdint>

namespace logitless::train {

// Linear warm-up to `peak`, then a cosine down to a tenth of it at `total` steps. The total may become known
// after some steps: the cosine starts at `decay_from`, and until then the rate does not depend on the total.
struct Schedule {
  double peak = 4e-3;
  int64_t warmup = 20;
  int64_t decay_from = 0;
  int64_t total = 0;  // 0: not known yet, no decay

  double learning_rate(int64_t step) const;  // `step` counts from 0
};

}  // namespace logitless::train
