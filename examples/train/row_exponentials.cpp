#include "train/row_exponentials.h"

#include <cmath>

// Compile for the wider vector units too, and choose when the program starts.
#if defined(__x86_64__) && defined(__linux__)
#define LOGITLESS_TRAIN_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LOGITLESS_TRAIN_CLONES
#endif

namespace logitless::train {

LOGITLESS_TRAIN_CLONES float row_exponentials(float* z, int64_t count, float max) {
  // The vector lanes of the sum, and so its order, differ between targets; the error stays that of fp32.
  float sum = 0.0F;
  for (int64_t j = 0; j < count; ++j) {
    z[j] = std::exp(z[j] - max);
    sum += z[j];
  }
  return sum;
}

}  // namespace logitless::train
