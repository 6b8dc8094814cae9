#include "cuda/run/sparsified/sizes.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace logitless::cuda {
namespace {

// Returns a count's mean plus eight standard deviations (its variance is at most its mean), but at most
// `most`.
int64_t with_deviations(double mean, int64_t most) {
  const double count = std::ceil(mean + 8 * std::sqrt(mean) + 16);
  return count < static_cast<double>(most) ? static_cast<int64_t>(count) : most;
}

// Returns the largest shard's part of columns that the whole vocabulary has, in steps of `step`.
int64_t of_largest(double columns, const Problem& p, int64_t step) {
  const double share = p.in_group() ? static_cast<double>(p.group_vocab) /
                                          static_cast<double>(std::max<int64_t>(p.vocab_total, 1))
                                    : 1;
  return std::max<int64_t>(static_cast<int64_t>(columns * share) / step, 1) * step;
}

}  // namespace

SparsifiedSizes sparsified_sizes(const Problem& p) {
  SparsifiedSizes s;
  // All ranks of a group use the sizes of its largest shard, or all of their columns if these are fewer. So
  // lists have the same length on each rank, and no rank needs more memory than the largest.
  const int64_t largest = p.in_group() ? p.group_vocab : p.vocab;
  const int64_t most = of_largest(static_cast<double>(kDenseColumns), p, 8);
  const int64_t dense = std::min({largest, std::max<int64_t>(largest / 96 / 8 * 8, 8), most});
  const int64_t others = largest - dense;
  s.dense = std::min(dense, p.vocab);
  // Longer lists tolerate a rougher lse estimate.
  const double sampled = static_cast<double>(kSampledColumns) * kLeastExpected / most_expected(p.threshold);
  s.sampled = std::min(p.vocab - s.dense, of_largest(sampled, p, 64));
  if (p.needs_backward() && p.has.d_weight) {
    s.frequent = std::min(p.vocab / 160 / 8 * 8, of_largest(static_cast<double>(kFrequentColumns), p, 8));
  }
  const double expected = 1 / p.threshold;
  s.capacity = with_deviations(most_expected(p.threshold) * expected, others) + 1;  // and the target
  s.capacity = (s.capacity + 1) / 2 * 2;                                            // whole 16 bytes
  s.kept = with_deviations(static_cast<double>(p.tokens) * expected, p.tokens * others) + p.tokens;
  return s;
}

ColumnRanges column_ranges(const Problem& p) {
  constexpr int64_t kRangeBytes = int64_t{40} << 20, kLeastRanges = 4;
  const auto count_of = [&](int shift) { return ((std::max<int64_t>(p.vocab, 1) - 1) >> shift) + 1; };
  const int64_t row_bytes = p.hidden * static_cast<int64_t>(size_of(p.dtype.weight));
  ColumnRanges r;
  while (r.shift > 0 && (row_bytes << r.shift > kRangeBytes || count_of(r.shift) < kLeastRanges)) --r.shift;
  while (count_of(r.shift) > kMostRanges) ++r.shift;
  r.count = static_cast<int>(count_of(r.shift));
  while (1 << r.bits < r.count) ++r.bits;
  return r;
}

std::string why_not_sparsified(const Problem& problem, int capability) {
  const SparsifiedSizes sizes = sparsified_sizes(problem);
  if (sizes.capacity > longest_list(capability)) {
    return std::string("threshold must be at least ") + (capability == 90 ? "2^-13" : "2^-12") +
           " for so large a vocabulary";
  }
  // column_lists.cu adds a column's count, at most the tokens, to the start of its list, at most sizes.kept.
  if (sizes.kept + problem.tokens >= std::numeric_limits<int32_t>::max()) {
    return "more than 2^31 elements may be kept: use a larger threshold or fewer tokens";
  }
  return "";
}

int64_t sparsified_gemm_bytes(const Problem& p) {
  constexpr int64_t kMost = int64_t{4} << 20, kParts = 4;  // of split sums
  const SparsifiedSizes s = sparsified_sizes(p);
  return std::min(kMost, kParts * (s.dense + s.frequent) * p.hidden * static_cast<int64_t>(sizeof(float)));
}

}  // namespace logitless::cuda
