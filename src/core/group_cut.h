#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace logitless {

// Numbers of a rank's message on CUDA behind those of its rows: a digest of its columns' place, and one of
// all that ranks must have in common. On the host check_agreement() (group_stats.h) exchanges them before the
// first row.
inline constexpr int64_t kCutNumbers = 4;

// Mixes the bits of a number. Sums of mixed numbers differ if the numbers or their order differ.
LOGITLESS_HD inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

LOGITLESS_HD inline uint64_t mixed_target(int64_t target, int64_t place) {
  return mixed(static_cast<uint64_t>(target) + static_cast<uint64_t>(place + 1) * 0x9E3779B97F4A7C15u);
}

// Digest of columns [first, end). The digests of shards that follow one another from 0, in any order, add up
// to that of [0, vocab_total).
LOGITLESS_HD inline uint64_t mixed_columns(int64_t first, int64_t end) {
  return mixed(static_cast<uint64_t>(end)) - mixed(static_cast<uint64_t>(first));
}

}  // namespace logitless
