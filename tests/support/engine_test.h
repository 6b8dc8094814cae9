#pragma once
// The fixture of tests of one property on every engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <vector>

#include "compare.h"

// Runs a suite's tests on each of these engines, of which there may be none.
#define LOGITLESS_TEST_ON(suite, engines)                              \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(suite);                \
  INSTANTIATE_TEST_SUITE_P(Engines, suite, testing::ValuesIn(engines), \
                           [](const auto& parameter) { return parameter.param.name(); })

namespace logitless_test {

// Returns the error of a call that must be refused.
template <class Call>
logitless::Error refusal(const Call& call) {
  try {
    call();
  } catch (const logitless::Error& error) {
    return error;
  }
  ADD_FAILURE() << "not refused";
  return {LOGITLESS_OK, ""};
}

inline double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}
inline bool all_are(double number, const std::vector<double>& values) {
  return std::ranges::all_of(values,
                             [&](double v) { return v == number || (std::isnan(v) && std::isnan(number)); });
}
inline bool all_finite(const std::vector<double>& values) {
  return std::ranges::all_of(values, [](double v) { return std::isfinite(v); });
}

// The ids of the k largest of a row's logits: NaN first, and the smaller id of equal ones.
inline std::vector<double> largest_ids(const std::vector<double>& logits, int64_t k) {
  std::vector<double> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::ranges::stable_sort(ids, [&](double a, double b) {
    const double x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return std::isnan(x) ? !std::isnan(y) : x > y;
  });
  return {ids.begin(), ids.begin() + k};
}

class EngineTest : public testing::TestWithParam<Engine> {
 protected:
  const Engine& engine() const { return GetParam(); }
  bool is_device() const { return engine().is_device(); }
  bool is_emulated() const { return engine().is_emulated(); }

  // A plain problem in the engine's most precise format.
  Case plain(uint64_t seed, PlainSize size) const { return plain_case(seed, size, engine().plain_dtype()); }

  // The first random problems from a seed on that the engine can run and `change` accepts, as it changes
  // them.
  std::vector<Case> random_cases(uint64_t seed, uint64_t count, CaseLimits limits = {},
                                 const std::function<bool(Case*)>& change = {}) const {
    limits.allow_fp64 = limits.allow_fp64 && engine().has_float64();
    std::vector<Case> out;
    for (; out.size() < count; ++seed) {
      Case c = random_case(seed, limits);
      if (engine().can_run(c.problem) && (!change || change(&c))) out.push_back(std::move(c));
    }
    return out;
  }

  Outputs solve(const Case& c, size_t budget = 0) const { return logitless_test::solve(context_, c, budget); }
  Bounds bounds_of(const Case& c) const { return Expected(c).bounds_of(engine()); }

  // Bounds where statistics of parts of the vocabulary are joined: each joining rounds them once more, and
  // each part of d_hidden is rounded.
  Bounds joined_bounds(const Case& c, const Expected& expected, size_t parts) const {
    const double times = static_cast<double>(parts + 1);
    const double unit = times * (stats_dtype(c.problem) == LOGITLESS_F64 ? 0x1p-53 : 0x1p-24);
    Bounds bounds = times * expected.bounds_of(engine());
    bounds.lse += unit;  // log(sum_exp): one rounding of its argument
    bounds.nll += unit;
    bounds.log_sum_sq_probs += 3 * unit;  // roundings of both sums, one of them used twice
    return bounds;
  }

  void expect_truth(const Case& c, size_t budget = 0) const { Expected(c).check(engine(), solve(c, budget)); }

  // Bytes that the plans of a problem take, other than 0.
  std::set<size_t> plan_bytes(const logitless::Problem& problem) const {
    std::set<size_t> bytes;
    for (const logitless::PlanInfo& plan : context_.plans(problem)) bytes.insert(plan.workspace_bytes);
    bytes.erase(0);
    return bytes;
  }

  // The ways to one gradient: in one run and in two; of a mean and of every row's own loss times `upstream`;
  // exact, with exp logits saved or not, and sparsified with every element kept, by each pass' own draws or
  // by the forward pass'.
  std::vector<Case> ways(const Case& c, double upstream) const {
    std::vector<Case> out;
    for (int32_t reduction : {LOGITLESS_REDUCTION_MEAN, LOGITLESS_REDUCTION_NONE}) {
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        Case way = c;
        way.mode = mode;
        way.problem.reduction = reduction;
        if (reduction == LOGITLESS_REDUCTION_NONE) {
          way.grad_loss.assign(static_cast<size_t>(c.problem.tokens), upstream);
        }
        out.push_back(way);
        if (mode == Mode::kForwardThenBackward) out.push_back(saving(way));
        if (!why_not_sparsified(engine()).empty()) continue;
        way.problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
        way.problem.threshold = 1e-30;
        out.push_back(way);
        if (mode == Mode::kForwardBackward) continue;
        way.problem.has.saved = 1;
        out.push_back(way);
      }
    }
    return out;
  }

  logitless::Context context_ = make_context(GetParam());
};

}  // namespace logitless_test
