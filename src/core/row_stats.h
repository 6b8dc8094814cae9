#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace headroom {

// Statistics of one row of logits over any set of columns. merge() is associative and RowStats{} is its
// neutral element, so tiles, vocabulary windows and shards are all joined by it.
template <class T>
struct RowStats {
  T max = -std::numeric_limits<T>::infinity();
  T sum_exp = 0;             // sum_j exp(z_j - max)
  T target_logit = 0;        // z_y, 0 when y is not among the columns
  T sum_exp_logit = 0;       // sum_j exp(z_j - max) z_j
  T weighted_logit_sum = 0;  // sum_j w_j z_j
  int64_t argmax = -1;       // global id, the first of equals
};

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
  stats.sum_exp *= factor;
  stats.sum_exp_logit *= factor;
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
  x.sum_exp += y.sum_exp;
  x.target_logit += y.target_logit;
  x.sum_exp_logit += y.sum_exp_logit;
  x.weighted_logit_sum += y.weighted_logit_sum;
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
