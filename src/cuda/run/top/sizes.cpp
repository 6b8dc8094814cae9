#include "cuda/run/top/sizes.h"

#include <algorithm>

#include "cuda/plan/sizes.h"

namespace logitless::cuda {
namespace {

// A sample of V / step columns costs 1 / step of the product. If its groups are twice k, about 1.4 k step
// elements are then listed for each row. (Of m elements above a threshold, as many groups as k have one: m =
// 2 k log 2.)
constexpr int64_t kMostStep = 32, kLeastStep = 4;
constexpr int64_t kGroupsOfK = 2;
// The length of a list varies by a factor of about 1 + 1 / sqrt(k). Above the largest of a sample of V / 32
// columns it exceeds 512 with a probability of 1e-7.
constexpr int64_t kMoreListed = 512;

int64_t columns_for_groups(const Problem& p, const EngineTraits& traits) {
  return kGroupsOfK * p.top_k * traits.top_tile / traits.top_groups;
}

// Returns the step for a vocabulary of this size.
int64_t step_of(const Problem& p, const EngineTraits& traits, int64_t vocab) {
  return std::clamp<int64_t>(vocab / columns_for_groups(p, traits), kLeastStep, kMostStep);
}

// Returns the step for a shard: its own, unless its sample would then be larger than that of the largest
// shard, which determines the memory.
int64_t step_of(const Problem& p, const EngineTraits& traits) {
  int64_t step = step_of(p, traits, p.vocab);
  if (!p.in_group()) return step;
  const int64_t most = ceil_div(p.group_vocab, step_of(p, traits, p.group_vocab));
  while (ceil_div(p.vocab, step) > most) ++step;
  return step;
}

}  // namespace

TopSizes top_sizes(const Problem& p, const PlanDetail& d) {
  const EngineTraits traits = d.engine->traits();
  TopSizes s;
  s.step = step_of(p, traits);
  s.sampled = ceil_div(p.vocab, s.step);
  if (s.sampled == 0) return s;  // an empty shard
  s.window = d.copies_weight && d.vocab_window < p.vocab ? std::min(s.sampled, d.vocab_window) : s.sampled;
  const auto groups_of = [&](int64_t columns) {
    return ceil_div(columns, traits.top_tile) * traits.top_groups;
  };
  s.groups = s.sampled / s.window * groups_of(s.window) + groups_of(s.sampled % s.window);
  s.capacity = 2 * p.top_k * s.step + kMoreListed;
  return s;
}

std::string why_not_listed(const Problem& p, const EngineTraits& traits) {
  if (p.top_k == 0 || traits.top_groups == 0) return "";
  // The least vocabulary for which the sample and a list each have at most a quarter of the columns.
  const int64_t least =
      kLeastStep * std::max(columns_for_groups(p, traits), kMoreListed + 2 * p.top_k * kLeastStep);
  if (p.vocab >= least) return "";
  return "top_k " + std::to_string(p.top_k) + " by lists needs a vocab of " + std::to_string(least);
}

template <class Real>
TopArenaOf<Real> lay_out_top(const Problem& p, const PlanDetail& d, int64_t rows, Workspace& w) {
  TopArenaOf<Real> a;
  if (p.top_k == 0) return a;
  const auto take = [&]<class T>(T*& data, int64_t count) { data = w.take<T>(count).data(); };
  take(a.best, rows * p.top_k);
  if (d.engine->traits().top_groups == 0) return a;
  const TopSizes s = top_sizes(p, d);
  if (p.has.bias) take(a.bias, s.sampled);
  if (p.has.sample_mask) take(a.mask, rows * mask_words(s.sampled));
  take(a.group_max, rows * s.groups);
  take(a.threshold, rows);
  take(a.count, rows);
  take(a.listed, rows * s.capacity);
  take(a.redo_count, 1);
  take(a.redo_rows, rows);
  return a;
}
template TopArena lay_out_top(const Problem&, const PlanDetail&, int64_t, Workspace&);
template TopArenaOf<double> lay_out_top(const Problem&, const PlanDetail&, int64_t, Workspace&);

}  // namespace logitless::cuda
