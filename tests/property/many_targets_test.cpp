// Several targets a row: class probabilities, several right classes, log-probabilities of given ids.
#include <gtest/gtest.h>

#include <cmath>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {
namespace {

class ManyTargets : public EngineTest {
 protected:
  Case plain(uint64_t seed, PlainSize size, int64_t count) const {
    Case c = EngineTest::plain(seed, size);
    Random random(seed);
    give_targets(random, &c, count, 0, 1);
    return c;
  }
};

// One target of weight 1 is the target of an ordinary row.
TEST_P(ManyTargets, OneIsTheTargetOfAnOrdinaryRow) {
  for (const Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kForwardThenBackward}) {
    Case one = EngineTest::plain(3, {70, 903, 20});
    one.mode = mode;
    Case many = one;
    many.problem.targets_per_row = 1;
    Outputs ordinary = solve(one), got = solve(many);
    if (is_device()) {
      expect_same_results(one, ordinary, got, Expected(one).bounds_of(engine()));
      continue;
    }
    for (size_t row = 0; row < 70 && !got.target_log_probs.empty(); ++row) {
      EXPECT_EQ(got.target_log_probs[row], -got.nll[row]);
    }
    got.target_log_probs.clear();
    EXPECT_STREQ(first_difference(ordinary, got), "") << static_cast<int>(mode);
  }
}

// A repeated target is one target of both weights, in whatever order.
TEST_P(ManyTargets, TheSameTargetAgain) {
  for (const Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
    Case c = plain(4, {40, 500, 16}, 4);
    c.mode = mode;
    for (size_t row = 0; row < 40; ++row) {
      for (size_t k = 0; k < 4; ++k) {
        c.targets[4 * row + k] = c.targets[4 * row];
        c.target_weight[4 * row + k] = 0.25 * static_cast<double>(k + 1);
      }
    }
    expect_truth(c);
    Case once = c;
    once.problem.targets_per_row = 1;
    once.targets.clear();
    for (size_t row = 0; row < 40; ++row) once.targets.push_back(c.targets[4 * row]);
    once.target_weight.assign(40, 2.5);
    Outputs many = solve(c), one = solve(once);
    many.target_log_probs.clear();
    one.target_log_probs.clear();
    if (!is_device()) {
      EXPECT_STREQ(first_difference(many, one), "");
    }
  }
}

// Only the targets have a gradient in a row whose weights add up to 0, even where one of them is very
// unlikely. Where a device has kept exp logits, the other columns get 2^-30 of a weight.
TEST_P(ManyTargets, WeightsThatCancel) {
  Case c = plain(5, {33, 700, 16}, 2);
  for (const double unlikely : {0, -40, -88}) {
    for (size_t row = 0; row < 4; ++row) {
      const int64_t target = c.targets[2 * row];
      if (target != c.problem.ignore_index) c.bias[static_cast<size_t>(target)] = unlikely;
    }
    for (const double sign : {-1, 0}) {
      for (size_t i = 0; i < c.target_weight.size(); ++i) c.target_weight[i] = i % 2 == 0 ? -sign : sign;
      const Expected expected(c);
      Bounds bounds = expected.tightest_bounds_of(engine());
      if (is_device()) {
        for (double Bounds::*each : {&Bounds::d_hidden, &Bounds::d_weight, &Bounds::d_bias})
          bounds.*each += 0x1p-28;
      }
      for (const Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        c.mode = mode;
        expected.check(solve(c), bounds);
      }
    }
  }
}

// A probability is nearly one: p - q keeps its digits.
TEST_P(ManyTargets, NearlyCertainRows) {
  Case c = plain(10, {16, 260, 8}, 2);
  for (size_t row = 0; row < 16; ++row) {
    c.targets[2 * row + 1] = c.problem.ignore_index;
    c.target_weight[2 * row] = 1;
    if (c.targets[2 * row] == c.problem.ignore_index) continue;
    const auto y = static_cast<size_t>(c.targets[2 * row]);
    for (size_t k = 0; k < 8; ++k) c.hidden[8 * row + k] = 64 * c.weight[8 * y + k];
  }
  const Expected expected(c);
  Bounds bounds = expected.tightest_bounds_of(engine());
  if (is_device()) {  // a target's logit is a sum of its own there, with an error beside that of lse
    for (double Bounds::*each : {&Bounds::d_hidden, &Bounds::d_weight, &Bounds::d_bias}) bounds.*each *= 2;
  }
  expected.check(solve(c), bounds);
}

TEST_P(ManyTargets, AMaskedColumnOfTheWeightZeroTakesNoPart) {
  Case c = plain(11, {10, 130, 8}, 3);
  c.bias[7] = -INFINITY;
  for (size_t row = 0; row < 10; ++row) {
    for (size_t k = 0; k < 3; ++k) {
      if (c.targets[3 * row + k] == 7) c.targets[3 * row + k] = 8;
    }
    c.targets[3 * row + 1] = 7;
    c.target_weight[3 * row + 1] = 0;
  }
  const Outputs got = solve(c);
  EXPECT_TRUE(std::isfinite(got.loss[0]));
  for (const auto* values : {&got.nll, &got.d_hidden, &got.d_weight, &got.d_bias}) {
    ASSERT_TRUE(all_finite(*values));
  }
  for (size_t row = 0; row < 10; ++row) EXPECT_EQ(got.target_log_probs[3 * row + 1], -INFINITY);
}

LOGITLESS_TEST_ON(ManyTargets, engines());

}  // namespace
}  // namespace logitless_test
