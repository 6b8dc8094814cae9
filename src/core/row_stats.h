#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/host_device.h"
#include "core/row_lists.h"

namespace logitless {

// Statistics of one row of logits over any set of columns: the maximum, its column, and the sums of
// row_lists.h relative to the maximum. merge() is associative with RowStats{} as its neutral element, so it
// joins tiles, vocabulary windows and shards.
template <class T>
struct RowStats {
  T max = -std::numeric_limits<T>::infinity();
  int64_t argmax = -1;  // global id, the smallest among equals
#define LOGITLESS_MEMBER(name, part, ...) T part = 0;
  LOGITLESS_ROW_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER
  // Sum of the class weights of columns whose part of `weighted` is relative to the maximum: all columns, or
  // 0 if that sum is of the logits themselves.
  T weight = 0;
};

// How sums merge.
enum class SumKind {
  kPlain,       // sum of the logits themselves
  kOffset,      // sum of w (z - max)
  kExp,         // sum of terms with the factor exp(z - max)
  kExpOffset,   // sum of exp(z - max) (z - max)
  kSquaredExp,  // sum of terms with the factor exp(z - max)^2
};

// Returns the number that sums are relative to: the maximum, or 0 if differences from it are no numbers.
template <class T>
LOGITLESS_HD inline T offset_of(T max) {
  return std::isfinite(max) ? max : T(0);
}

// Returns how often the logit offset is in a sum.
template <class T>
LOGITLESS_HD inline T mass_of(SumKind kind, const RowStats<T>& stats) {
  return kind == SumKind::kOffset ? stats.weight : kind == SumKind::kExpOffset ? stats.sum_exp : T(0);
}

// Returns a sum for a logit offset that is smaller by `by`. A sum without a logit offset stays as it is, even
// if it is no number.
template <class T>
LOGITLESS_HD inline T moved_sum(T sum, T mass, T by) {
  return mass == 0 ? sum : sum + by * mass;
}

// Returns a sum of exp logits relative to another maximum. factor: rebase_factor() of the two.
template <class T>
LOGITLESS_HD inline T rebased_sum(SumKind kind, T sum, T factor) {
  if (kind == SumKind::kPlain || kind == SumKind::kOffset) return sum;
  return kind == SumKind::kSquaredExp ? sum * factor * factor : sum * factor;
}

// Returns the sum of the logits themselves from one relative to the maximum.
template <class T>
LOGITLESS_HD inline T plain_sum(SumKind kind, T part, const RowStats<T>& stats) {
  return moved_sum(part, mass_of(kind, stats), offset_of(stats.max));
}

// Makes `weighted` relative to the maximum in statistics of a whole vocabulary where it is the sum of the
// logits themselves. Such a sum has lost digits to a common offset.
template <class T>
LOGITLESS_HD inline RowStats<T> with_weighted_offset(RowStats<T> stats, T class_weight_sum) {
  stats.weighted = moved_sum(stats.weighted, class_weight_sum, -offset_of(stats.max));
  stats.weight = class_weight_sum;
  return stats;
}

// Returns exp(from - to) for two logit offsets. Equal ones give 1, infinities included.
template <class T>
LOGITLESS_HD inline T rebase_factor(T from, T to) {
  return from == to ? T(1) : std::exp(from - to);
}

// Returns the statistics with their sums relative to new_max >= stats.max.
template <class T>
LOGITLESS_HD inline RowStats<T> rebase(const RowStats<T>& stats, T new_max) {
  const T factor = rebase_factor(stats.max, new_max);
  const T by = offset_of(stats.max) - offset_of(new_max);
  RowStats<T> out = stats;
  out.max = new_max;
#define LOGITLESS_REBASE(name, part, kind, ...) \
  out.part = rebased_sum(SumKind::kind, moved_sum(stats.part, mass_of(SumKind::kind, stats), by), factor);
  LOGITLESS_ROW_SUMS(LOGITLESS_REBASE)
#undef LOGITLESS_REBASE
  return out;
}

template <class T>
LOGITLESS_HD inline RowStats<T> merge(const RowStats<T>& a, const RowStats<T>& b) {
  // A NaN maximum wins, so that a merge never loses a NaN logit. Its id is the argmax, as in PyTorch.
  const T new_max = (a.max > b.max || std::isnan(a.max)) ? a.max : b.max;
  RowStats<T> x = rebase(a, new_max);
  const RowStats<T> y = rebase(b, new_max);
  const bool a_nan = std::isnan(a.max);
  const bool b_nan = std::isnan(b.max);
  const bool equal = a_nan ? b_nan : a.max == b.max;
  const bool b_larger = b_nan ? !a_nan : b.max > a.max;
  const bool take_b = a.argmax < 0 || b_larger || (equal && b.argmax >= 0 && b.argmax < a.argmax);
  x.argmax = take_b ? b.argmax : a.argmax;
#define LOGITLESS_ADD(name, part, ...) x.part += y.part;
  LOGITLESS_ROW_SUMS(LOGITLESS_ADD)
#undef LOGITLESS_ADD
  x.weight += y.weight;
  return x;
}

template <class T>
LOGITLESS_HD inline T log_sum_exp(const RowStats<T>& stats) {
  return stats.max + std::log(stats.sum_exp);
}

// The log of a sum of exp logits in two parts. Then log p = z - lse loses nothing to an offset that all
// logits have in common; `high + low` may hold no digit of `low`.
template <class T>
struct LogSumExp {
  T high = 0, low = 0;

  LOGITLESS_HD T value() const { return high + low; }
  LOGITLESS_HD T log_p(T z) const { return (z - high) - low; }
};

template <class T>
LOGITLESS_HD inline LogSumExp<T> log_sum_exp_parts(const RowStats<T>& stats) {
  return {stats.max, std::log(stats.sum_exp)};
}

}  // namespace logitless
