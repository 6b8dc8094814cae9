#pragma once
// The fixture of tests of one property on every engine.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "compare.h"

// Runs a suite's tests on each of these engines, of which there may be none.
#define LOGITLESS_TEST_ON(suite, engines)                              \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(suite);                \
  INSTANTIATE_TEST_SUITE_P(Engines, suite, testing::ValuesIn(engines), \
                           [](const auto& parameter) { return parameter.param.name(); })

namespace logitless_test {

class EngineTest : public testing::TestWithParam<Engine> {
 protected:
  const Engine& engine() const { return GetParam(); }
  bool is_device() const { return engine().is_device(); }

  // A plain problem in the engine's most precise format.
  Case plain(uint64_t seed, PlainSize size) const { return plain_case(seed, size, engine().plain_dtype()); }

  Outputs solve(const Case& c, size_t budget = 0) const { return logitless_test::solve(context_, c, budget); }
  Bounds bounds_of(const Case& c) const { return Expected(c).bounds_of(engine()); }

  void expect_truth(const Case& c, size_t budget = 0) const { Expected(c).check(engine(), solve(c, budget)); }

  // Bytes that the plans of a problem take, other than 0.
  std::set<size_t> plan_bytes(const logitless::Problem& problem) const {
    std::set<size_t> bytes;
    for (const logitless::PlanInfo& plan : context_.plans(problem)) bytes.insert(plan.workspace_bytes);
    bytes.erase(0);
    return bytes;
  }

  // The ways to one gradient: in one run and in two, of a mean and of every row's own loss times `upstream`,
  // exact and thinned with every element kept, whose draws are each pass's own or the forward pass's.
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
        if (!why_not_thinned(engine()).empty()) continue;
        way.problem.gradient = LOGITLESS_ALWAYS_THINNED;
        way.problem.threshold = 1e-30;
        out.push_back(way);
        if (mode == Mode::kForwardBackward) continue;
        way.problem.has.draws = 1;
        out.push_back(way);
      }
    }
    return out;
  }

  logitless::Context context_ = make_context(GetParam());
};

}  // namespace logitless_test
