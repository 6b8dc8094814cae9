#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/host_device.h"
#include "core/row_lists.h"

namespace headroom {

// Statistics of one row of logits over any set of columns: the maximum, where it is, and the sums of
// row_lists.h. merge() is associative and RowStats{} is its neutral element, so tiles, vocabulary windows and
// shards are all joined by it.
template <class T>
struct RowStats {
  T max = -std::numeric_limits<T>::infinity();
  int64_t argmax = -1;  // global id, the first of equals
#define HEADROOM_MEMBER(name, ...) T name = 0;
  HEADROOM_ROW_SUMS(HEADROOM_MEMBER)
#undef HEADROOM_MEMBER
};

// How sums merge.
enum class SumKind {
  kPlain,      // of terms that know no maximum
  kExp,        // of terms with the factor exp(z - max)
  kExpOffset,  // the same of exp(z - max) z, of which tiles sum up exp(z - max) (z - max): no digits are lost
               // to an offset that all logits have in common
  kSquaredExp,  // of terms with the factor exp(z - max)^2
};

// A sum relative to a maximum, relative to another one; factor: rebase_factor() of the two.
template <class T>
HEADROOM_HD inline T rebased_sum(SumKind kind, T sum, T factor) {
  if (kind == SumKind::kPlain) return sum;
  return kind == SumKind::kSquaredExp ? sum * factor * factor : sum * factor;
}

// A statistic from what a tile has summed up relative to an anchor, and the reverse. sum_exp: the tile's. Of
// a tile without any exp both are 0.
template <class T>
HEADROOM_HD inline T sum_of_part(SumKind kind, T part, T anchor, T sum_exp) {
  if (kind != SumKind::kExpOffset) return part;
  return sum_exp == 0 ? 0 : part + anchor * sum_exp;
}
template <class T>
HEADROOM_HD inline T part_of_sum(SumKind kind, T sum, T anchor, T sum_exp) {
  return sum_of_part(kind, sum, -anchor, sum_exp);
}

// exp(z - max) for a factor between two anchors: 1 for equal anchors, infinities included.
template <class T>
HEADROOM_HD inline T rebase_factor(T from, T to) {
  return from == to ? T(1) : std::exp(from - to);
}

// The same statistics with the sums relative to new_max >= stats.max.
template <class T>
HEADROOM_HD inline RowStats<T> rebase(RowStats<T> stats, T new_max) {
  const T factor = rebase_factor(stats.max, new_max);
  stats.max = new_max;
#define HEADROOM_REBASE(name, part, kind, ...) stats.name = rebased_sum(SumKind::kind, stats.name, factor);
  HEADROOM_ROW_SUMS(HEADROOM_REBASE)
#undef HEADROOM_REBASE
  return stats;
}

template <class T>
HEADROOM_HD inline RowStats<T> merge(const RowStats<T>& a, const RowStats<T>& b) {
  // A NaN maximum wins, so that a NaN logit is never lost in a merge; as in PyTorch its id is the argmax.
  const T new_max = (a.max > b.max || std::isnan(a.max)) ? a.max : b.max;
  RowStats<T> x = rebase(a, new_max);
  const RowStats<T> y = rebase(b, new_max);
  const bool a_nan = std::isnan(a.max);
  const bool b_nan = std::isnan(b.max);
  const bool equal = a_nan ? b_nan : a.max == b.max;
  const bool b_larger = b_nan ? !a_nan : b.max > a.max;
  const bool take_b = a.argmax < 0 || b_larger || (equal && b.argmax >= 0 && b.argmax < a.argmax);
  x.argmax = take_b ? b.argmax : a.argmax;
#define HEADROOM_ADD(name, ...) x.name += y.name;
  HEADROOM_ROW_SUMS(HEADROOM_ADD)
#undef HEADROOM_ADD
  return x;
}

template <class T>
HEADROOM_HD inline T log_sum_exp(const RowStats<T>& stats) {
  return stats.max + std::log(stats.sum_exp);
}

// The log of a sum of exps in two parts, so that log p = z - lse loses nothing to an offset that all logits
// have in common: their sum may hold no digit of `low`.
template <class T>
struct LogSumExp {
  T high = 0, low = 0;

  HEADROOM_HD T value() const { return high + low; }
  HEADROOM_HD T log_p(T z) const { return (z - high) - low; }
};

template <class T>
HEADROOM_HD inline LogSumExp<T> log_sum_exp_parts(const RowStats<T>& stats) {
  return {stats.max, std::log(stats.sum_exp)};
}

}  // namespace headroom
