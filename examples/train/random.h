#pragma once

// SplitMix64: a small generator whose stream is the same on every machine and standard library, which
// std::normal_distribution and std::shuffle do not promise.

#include <cmath>
#include <cstdint>
#include <numbers>

namespace logitless::train {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  // In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

  // In [0, bound). The bias of the multiplication is below bound / 2^53.
  int64_t below(int64_t bound) { return static_cast<int64_t>(uniform() * static_cast<double>(bound)); }

  // Box-Muller; the second of each pair is dropped for simplicity.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace logitless::train
