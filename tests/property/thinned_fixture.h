#pragma once
// Plain problems with thinned gradients, on every engine that makes them.
#include <gtest/gtest.h>

#include <vector>

#include "engine_test.h"

namespace logitless_test {

// No probability is below such a threshold: nothing is drawn.
constexpr double kKeepsAll = 1e-30;

class ThinnedTest : public EngineTest {
 protected:
  void SetUp() override {
    const std::string why = why_not_thinned(engine());
    if (!why.empty()) GTEST_SKIP() << why;
  }

  // Gradients in float32, so that a rounding to their dtype is no bias of a mean.
  Case thinned(PlainSize size, double threshold, uint64_t seed = 41) const {
    Case c = plain(seed, size);
    c.problem.dtype.d_hidden = c.problem.dtype.d_classifier = c.problem.dtype.d_bias = LOGITLESS_F32;
    c.problem.gradient = LOGITLESS_ALWAYS_THINNED;
    c.problem.threshold = threshold;
    return c;
  }

  // In one run, by draws that are kept, and by draws of the backward pass; from the smallest workspace.
  std::vector<Outputs> all_ways(Case c) const {
    std::vector<Outputs> out;
    c.mode = Mode::kForwardBackward;
    out.push_back(solve(c));
    c.mode = Mode::kForwardThenBackward;
    out.push_back(solve(c));
    c.problem.has.draws = 1;
    out.push_back(solve(c));
    return out;
  }
};

}  // namespace logitless_test
