#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "core/host_device.h"
#include "core/problem.h"
#include "cuda/run/arena.h"

namespace logitless::cuda {

// Most columns of a vocabulary that are computed densely instead of being drawn, and that are sampled for the
// lse estimate. All ranks' lse estimates are joined, so a rank of a group has the largest shard's share of
// these columns and of frequent ones.
inline constexpr int64_t kDenseColumns = 768;
inline constexpr int64_t kSampledColumns = 768;
// Most columns that become frequent (frequent_columns.cu); each of them has more than kLeastFrequent kept
// elements.
inline constexpr int64_t kFrequentColumns = 1024;
inline constexpr int32_t kLeastFrequent = 32;
// As a share of the threshold: an lse estimate may be too high by a factor of 2, see docs/sparsified.md.
inline constexpr float kCertainShare = 0.5f;
// From here on, logits of two products differ by more than the rounding of dz to 16 bits.
inline constexpr float kLargeLogit = 4096;
// A row whose q add up to less, over all columns, is drawn again: its lse estimate was too high.
inline constexpr double kLeastSum = 1.001 * kCertainShare;
// A row is drawn again if its expected number of kept elements exceeds this over threshold. (With lse as the
// estimate it is at most 1 over threshold.) One such row costs a whole pass over the weight. Lists for large
// thresholds are short, so they may have 768 elements, and up to 3 over threshold.
inline constexpr double kLeastExpected = 1.5, kMostExpected = 3;
inline double most_expected(double threshold) {
  return std::clamp(768 * threshold, kLeastExpected, kMostExpected);
}
// A row's list is sorted in shared memory, of which some devices have less. capability: 90 for Hopper.
constexpr int longest_list(int capability) {
  return capability == 90 ? 16384 : 8192;
}
// Smaller thresholds also keep everything, and fp32 has room for this one.
inline constexpr double kLeastThreshold = 1e-30;

// Bytes of the weight that a screen rounds at a time.
inline constexpr int64_t kScreenBytes = int64_t{48} << 20;

// Ranges of columns whose logits a screen's second draw asks for one after the other: `count` of 2^shift
// columns each, at most 2^bits.
struct ColumnRanges {
  int shift = 31, bits = 0, count = 1;
  LOGITLESS_HD int of(int32_t column) const { return column >> shift; }
};
inline constexpr int kMostRanges = 128;
// Ranges whose rows of the weight stay in L2; a few at least, so that small problems have some as well.
ColumnRanges column_ranges(const Problem& problem);

// Whether the memory of d_weight has room for all rounded rows of the weight. A run writes it last, unless
// the scale counts as 0 (Runner::products).
inline bool rounds_into_d_weight(const Problem& p, DType dtype) {
  return !p.has.screen_weight && p.has.d_weight && !p.accumulate.d_weight && !p.unaligned_rows &&
         std::abs(p.scale) >= double{std::numeric_limits<float>::min()} &&
         p.hidden * static_cast<int64_t>(size_of(p.dtype.d_weight)) >=
             rounded_stride(p) * static_cast<int64_t>(size_of(dtype)) + kRoundedAlignment;
}

// Whether all rounded rows of the weight lie in one place: there, or in Buffers::screen_weight.
inline bool rounds_whole_weight(const Problem& p, DType dtype) {
  return p.has.screen_weight || rounds_into_d_weight(p, dtype);
}

// Columns of the weight that are rounded at a time into the workspace, in whole tiles. Beside d_weight they
// are few, for the case that its rows begin anywhere.
inline int64_t screen_window(const Problem& problem, DType dtype) {
  constexpr int64_t kTiles = 192, kLeast = 4;
  const int64_t bytes = rounded_stride(problem) * static_cast<int64_t>(size_of(dtype));
  const int64_t tiles = rounds_into_d_weight(problem, dtype) ? 0 : kScreenBytes / bytes / kTiles;
  return std::min(problem.vocab, std::max(tiles, kLeast) * kTiles);
}

inline float threshold_of(const Problem& problem) {
  return static_cast<float>(problem.threshold < kLeastThreshold ? kLeastThreshold : problem.threshold);
}

// The dense part and the lists of a sparsified run.
struct SparsifiedSizes {
  int64_t dense = 0;     // the most frequent targets, one column in 96
  int64_t sampled = 0;   // other columns, for the lse estimate
  int64_t frequent = 0;  // one column in 160
  int64_t capacity = 0;  // of a row's list after the first draw
  int64_t kept = 0;      // of all rows' lists after the second draw, targets included
};

// Returns the sizes. Capacities leave eight standard deviations (a count's variance is at most its mean),
// which are exceeded with a probability of 1e-15.
SparsifiedSizes sparsified_sizes(const Problem& problem);

// Returns why a device of this compute capability (90 for Hopper) cannot run a sparsified problem; empty if
// it can.
std::string why_not_sparsified(const Problem& problem, int capability);

// Scratch of the products of dense columns, which are small: more scratch would be most of a sparsified run's
// memory. It is the same for every budget, because cuBLASLt's choice of an algorithm depends on it, and with
// it a sum's last bits.
int64_t sparsified_gemm_bytes(const Problem& problem);

// Scratch of a scan over the vocabulary. CUB would query the driver for the exact number, and rejects less
// than it needs (about 32 bytes for each 1,000 elements).
constexpr int64_t scan_bytes(int64_t vocab) {
  return 65536 + vocab / 16;
}

}  // namespace logitless::cuda
