#pragma once
// Plain problems with thinned gradients, on every engine that makes them.
#include <gtest/gtest.h>

#include <vector>

#include "compare.h"

namespace logitless_test {

class ThinnedTest : public testing::TestWithParam<Engine> {
 protected:
  void SetUp() override {
    const std::string why = why_not_thinned(GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }

  Case thinned(PlainSize size, double threshold) const {
    Case c = plain_case(41, size, GetParam().plain_dtype());
    c.problem.dtype.d_hidden = c.problem.dtype.d_classifier = c.problem.dtype.d_bias = LOGITLESS_F32;
    c.problem.gradient = LOGITLESS_ALWAYS_THINNED;
    c.problem.threshold = threshold;
    return c;
  }

  // In one run, by draws that are kept, and by draws of the backward pass; from the smallest workspace.
  std::vector<Outputs> all_ways(Case c) const {
    std::vector<Outputs> out;
    c.mode = Mode::kForwardBackward;
    out.push_back(solve(context_, c));
    c.mode = Mode::kForwardThenBackward;
    out.push_back(solve(context_, c));
    c.problem.has.draws = 1;
    out.push_back(solve(context_, c));
    return out;
  }

  logitless::Context context_ = make_context(GetParam());
};

}  // namespace logitless_test
