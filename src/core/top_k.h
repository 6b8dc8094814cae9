#pragma once
#include <cmath>
#include <cstdint>
#include <span>

#include "core/host_device.h"

namespace logitless {

inline constexpr int64_t kMostTopK = 64;

// Orders a row's largest logits as merge() chooses the argmax: a NaN before all numbers, and the smaller id
// first among equals.
template <class T, class Id>
LOGITLESS_HD inline bool is_better(T z, Id id, T than, Id than_id) {
  if (std::isnan(z)) return !std::isnan(than) || id < than_id;
  if (std::isnan(than)) return false;
  return z > than || (z == than && id < than_id);
}

template <class T>
struct TopLogit {
  T z = 0;
  int64_t id = 0;
};

// Inserts a logit among the first `count` of `best`, which are in order, and returns the new count. If all
// places are taken, the last logit drops out, or the new one if it is no better. The result does not depend
// on the order of insertions.
template <class T>
inline int64_t insert_top(std::span<TopLogit<T>> best, int64_t count, TopLogit<T> next) {
  const auto most = static_cast<int64_t>(best.size());
  const auto at = [&](int64_t i) -> TopLogit<T>& { return best[static_cast<size_t>(i)]; };
  if (count == most && !is_better(next.z, next.id, at(most - 1).z, at(most - 1).id)) return count;
  int64_t place = count < most ? count++ : most - 1;
  for (; place > 0 && is_better(next.z, next.id, at(place - 1).z, at(place - 1).id); --place) {
    at(place) = at(place - 1);
  }
  at(place) = next;
  return count;
}

}  // namespace logitless
