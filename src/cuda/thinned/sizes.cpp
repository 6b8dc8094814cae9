#include "cuda/thinned/sizes.h"

#include <algorithm>
#include <cmath>

namespace headroom::cuda {
namespace {

int64_t with_deviations(double mean) {
  return static_cast<int64_t>(std::ceil(mean + 8 * std::sqrt(mean) + 16));
}

}  // namespace

ThinSizes thin_sizes(const Problem& p) {
  ThinSizes s;
  const bool few = p.vocab <= kDenseColumns + kSampledColumns;
  s.dense = few ? p.vocab : kDenseColumns;
  s.sampled = few ? 0 : kSampledColumns;
  const int64_t cold = p.vocab - s.dense;
  const double expected = 1 / p.threshold;
  s.capacity = std::min(cold, with_deviations(kMostExpected * expected)) + 1;  // and the target
  s.capacity = (s.capacity + 1) / 2 * 2;                                       // of 16 bytes
  const auto rows = static_cast<double>(p.tokens);
  s.kept = std::min(p.tokens * (cold + 1), with_deviations(rows * expected) + p.tokens);
  return s;
}

}  // namespace headroom::cuda
