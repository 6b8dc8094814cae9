#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace logitless {

// A rank's message on CUDA, behind the numbers of its rows: a digest of where its columns lie, and one of
// what all ranks have in common. On the host check_agreement() (group_stats.h) has them before the first row.
inline constexpr int64_t kCutNumbers = 4;

// Sums of these tell other values, or another order of them, apart.
LOGITLESS_HD inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

LOGITLESS_HD inline uint64_t mixed_target(int64_t target, int64_t place) {
  return mixed(static_cast<uint64_t>(target) + static_cast<uint64_t>(place + 1) * 0x9E3779B97F4A7C15u);
}

// For the columns [0, vocab_total): the sum over shards that follow one another from 0, in any order.
LOGITLESS_HD inline uint64_t mixed_columns(int64_t first, int64_t end) {
  return mixed(static_cast<uint64_t>(end)) - mixed(static_cast<uint64_t>(first));
}

}  // namespace logitless
