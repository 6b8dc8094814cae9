#pragma once
// Problems with sparsified gradients, on every engine that makes them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "engine_test.h"

namespace logitless_test {

// No probability is below such a threshold: nothing is drawn.
constexpr double kKeepsAll = 1e-30;

inline Case as_sparsified(Case c, double threshold, int64_t seed = 0) {
  c.problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
  c.problem.threshold = threshold;
  c.problem.seed = seed;
  return c;
}

// Sums over seeds of a gradient.
struct Sums {
  std::vector<double> sum, square, least, most;
  int64_t seeds = 0;

  void add(const std::vector<double>& values) {
    if (sum.empty()) {
      sum.assign(values.size(), 0);
      square = sum;
      least = most = values;
    }
    for (size_t i = 0; i < values.size(); ++i) {
      sum[i] += values[i];
      square[i] += values[i] * values[i];
      least[i] = std::min(least[i], values[i]);
      most[i] = std::max(most[i], values[i]);
    }
    ++seeds;
  }
  double mean(size_t i) const { return sum[i] / static_cast<double>(seeds); }
  // The variance of the mean.
  double variance(size_t i) const {
    const auto n = static_cast<double>(seeds);
    return std::max(0.0, square[i] / n - mean(i) * mean(i)) / n;
  }
  double range(size_t i) const { return most[i] - least[i]; }
};

class SparsifiedTest : public EngineTest {
 protected:
  void SetUp() override {
    const std::string why = why_not_sparsified(engine());
    if (!why.empty()) GTEST_SKIP() << why;
  }

  // Why the engine takes no screen; empty if it does.
  std::string why_not_screened() const {
    logitless::Problem p = pass_problem(sparsified({4, 30, 8}, 0x1p-3), logitless::Pass::forward_backward);
    p.screen = LOGITLESS_SCREEN_FP8;
    try {
      const logitless::Plan plan(context_, p);
      return "";
    } catch (const logitless::Error& error) {
      if (error.status() != LOGITLESS_UNSUPPORTED) throw;
      return error.what();
    }
  }

  // A case with gradients in float32, so that a rounding to their dtype is no bias of a mean.
  Case sparsified(PlainSize size, double threshold, uint64_t seed = 41) const {
    Case c = as_sparsified(plain(seed, size), threshold);
    c.problem.dtype.d_hidden = c.problem.dtype.d_weight = c.problem.dtype.d_bias = LOGITLESS_F32;
    return c;
  }

  // Runs in one pass, by draws that are kept, and by draws of the backward pass, each from the smallest
  // workspace.
  std::vector<Outputs> all_ways(Case c) const {
    std::vector<Outputs> out;
    c.mode = Mode::kForwardBackward;
    out.push_back(solve(c));
    c.mode = Mode::kForwardThenBackward;
    out.push_back(solve(c));
    c.problem.has.saved = 1;
    out.push_back(solve(c));
    return out;
  }

  // The most elements that a row keeps beside a device's dense columns and its target.
  static double most_kept(double threshold) { return 1 / threshold + std::sqrt(128 / threshold) + 48; }

  // Draws make all elements of these rows but the target's: dz of each sums up to 0, and each keeps as many
  // as it may.
  // dense: elements that a device keeps beside these.
  void expect_drawn(const Outputs& got, const Case& c, double dense) const {
    const double threshold = c.problem.threshold, rows = static_cast<double>(c.problem.tokens);
    const double of_rows = c.problem.reduction == LOGITLESS_REDUCTION_SUM ? rows : 1 / rows;
    EXPECT_NEAR(sum_of(got.d_bias), 0, 6 * std::sqrt(threshold * of_rows));
    for (double kept : got.kept_count) {
      EXPECT_LE(kept, most_kept(threshold) + 1 + (is_device() ? dense : 0));
      EXPECT_GE(kept, 2);
    }
  }
};

}  // namespace logitless_test
