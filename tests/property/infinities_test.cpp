// Logits of infinity and NaN, and a softcap that is reached: what PyTorch makes of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine_test.h"

namespace logitless_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Infinities : public EngineTest {
 protected:
  Case plain(uint64_t seed, PlainSize size) const {
    Case c = EngineTest::plain(seed, size);
    c.problem.dtype.d_hidden = c.problem.dtype.d_classifier = c.problem.dtype.d_bias = LOGITLESS_F32;
    return c;
  }
};

// A masked target costs infinity in its own row, whose gradient is finite: p = 0 there as in any other masked
// column, and -1 of the target.
TEST_P(Infinities, MaskedTarget) {
  Case c = plain(9, {6, 50, 4});
  c.targets = {1, 2, 3, 4, 5, 6};
  Case finite = c;  // of the same gradients
  c.bias[3] = -kInfinity;
  finite.bias[3] = -1024;
  const std::vector<Case> finite_ways = ways(finite, 0.5);
  size_t at = 0;
  for (const Case& way : ways(c, 0.5)) {
    SCOPED_TRACE(describe(way));
    Case same = finite_ways[at++];
    const Answer truth = Expected(same).truth();
    same.bias[3] = 0;  // a bound without the rounding of a logit of -1024
    const Outputs got = solve(way);
    for (size_t i = 0; i < 6; ++i) {
      if (got.loss.size() == 6) {
        EXPECT_EQ(got.loss[i] == kInfinity, i == 2);
        EXPECT_FALSE(std::isnan(got.loss[i]));
      }
      EXPECT_EQ(got.nll[i] == kInfinity, i == 2);
    }
    expect_gradients(got, truth, bounds_of(same));
  }
}

// A logit of +inf, of the target or not, makes loss and gradients of its row NaN, as in PyTorch.
TEST_P(Infinities, PlusInfinity) {
  for (int64_t column : {0, 7, 449}) {
    Case c = plain(3, {3, 450, 4});
    c.problem.has.argmax = c.problem.has.entropy = 1;
    c.problem.has.mean_logit = c.problem.has.log_sum_sq_probs = 1;
    c.targets = {7, 8, 9};
    c.bias[static_cast<size_t>(column)] = kInfinity;
    for (const Case& way : ways(c, 0.5)) {
      SCOPED_TRACE(describe(way));
      const Outputs got = solve(way);
      EXPECT_EQ(got.mean_logit, std::vector<double>(3, kInfinity));
      EXPECT_EQ(got.max_logit, std::vector<double>(3, kInfinity));
      EXPECT_EQ(got.is_top1, (std::vector<double>{column == 7 ? 1.0 : 0.0, 0, 0}));
      for (const auto* nan :
           {&got.loss, &got.nll, &got.lse, &got.entropy, &got.log_sum_sq_probs, &got.d_hidden}) {
        EXPECT_TRUE(std::all_of(nan->begin(), nan->end(), [](double v) { return std::isnan(v); }));
      }
      EXPECT_EQ(got.argmax, std::vector<double>(3, static_cast<double>(column)));
    }
  }
}

// Masked columns have probability 0, no part in what is summed over probabilities, and no gradient; all
// others' mean is -inf. Some are a whole block.
TEST_P(Infinities, MaskedColumns) {
  Case c = plain(8, {5, 1500, 4});
  c.problem.has.entropy = c.problem.has.argmax = 1;
  c.problem.has.mean_logit = c.problem.has.log_sum_sq_probs = 1;
  c.targets = {0, 1, 2, 3, 4};
  Case finite = c;
  const auto is_masked = [](size_t j) { return j >= 100 && (j < 1100 || j % 3 != 0); };
  for (size_t j = 0; j < 1500; ++j) {
    if (is_masked(j)) c.bias[j] = -kInfinity, finite.bias[j] = -1000;
  }
  const std::vector<Case> finite_ways = ways(finite, 0.5);
  size_t at = 0;
  for (const Case& way : ways(c, 0.5)) {
    SCOPED_TRACE(describe(way));
    Case same = finite_ways[at++];
    const Answer truth = Expected(same).truth();
    for (double& bias : same.bias) bias = std::max(bias, -10.0);  // a bound without the rounding of -1000
    const Bounds bounds = bounds_of(same);
    const Outputs got = solve(way);
    const logitless_dtype dtype = stats_dtype(c.problem);
    EXPECT_EQ(got.mean_logit, std::vector<double>(5, -kInfinity));
    EXPECT_TRUE(close("loss", got.loss, truth.loss, bounds.loss, dtype));
    EXPECT_TRUE(close("entropy", got.entropy, truth.entropy, bounds.entropy, dtype));
    EXPECT_TRUE(close("log_sum_sq_probs", got.log_sum_sq_probs, truth.log_sum_sq_probs,
                      bounds.log_sum_sq_probs, dtype));
    EXPECT_TRUE(close("max_logit", got.max_logit, truth.max_logit, bounds.logit, dtype));
    EXPECT_TRUE(close("target_logit", got.target_logit, truth.target_logit, bounds.logit, dtype));
    expect_gradients(got, truth, bounds);
    for (size_t j = 0; j < 1500; ++j) {
      if (!is_masked(j)) continue;
      EXPECT_EQ(got.d_bias[j], 0);
      for (size_t k = 4 * j; k < 4 * j + 4; ++k) EXPECT_EQ(got.d_classifier[k], 0);
    }
  }
}

// The argmax of a row with NaN is the first of these.
TEST_P(Infinities, ArgmaxIsTheFirstNaN) {
  for (int64_t first : {0, 5, 31, 300, 447, 448, 899}) {
    Case c = plain(4, {3, 900, 4});
    c.problem.has.argmax = c.problem.has.mean_logit = c.problem.has.log_sum_sq_probs = 1;
    c.bias[20] = 100;  // before and after, where NaN are lost in a maximum of numbers
    c.bias[600] = 200;
    for (int64_t j : {first, int64_t{899}}) c.bias[static_cast<size_t>(j)] = NAN;
    const Outputs got = solve(c);
    EXPECT_EQ(got.argmax, std::vector<double>(3, static_cast<double>(first)));
    EXPECT_TRUE(std::isnan(got.loss[0]));
    for (const auto* nan : {&got.max, &got.max_logit, &got.mean_logit, &got.log_sum_sq_probs}) {
      EXPECT_TRUE(std::isnan((*nan)[0]));
    }
  }
}

// Without label smoothing nobody reads the weight of a class that is no target: the inverse of its count is
// infinite.
TEST_P(Infinities, WeightsOfUnusedClasses) {
  Case c = plain(7, {6, 90, 4});
  c.problem.has.class_weight = 1;
  c.targets = {1, 2, 3, 1, 2, 3};
  c.class_weight.assign(90, 1.5);
  const std::vector<Case> finite = ways(c, 0.5);
  for (double weight : {kInfinity, -kInfinity, static_cast<double>(NAN)}) {
    std::fill(c.class_weight.begin() + 4, c.class_weight.end(), weight);
    size_t at = 0;
    for (const Case& way : ways(c, 0.5)) {
      SCOPED_TRACE(describe(way));
      const Outputs got = solve(way), expected = solve(finite[at++]);
      for (const auto member :
           {&Outputs::loss, &Outputs::d_hidden, &Outputs::d_classifier, &Outputs::d_bias}) {
        EXPECT_EQ(got.*member, expected.*member);
      }
    }
  }
}

// Where tanh is 1 there is no gradient at all.
TEST_P(Infinities, SaturatedSoftcap) {
  for (double softcap : {1e-3, 0.3, 5.0, 30.1}) {
    Case c = plain(5, {4, 500, 3});
    c.problem.softcap = softcap;
    for (size_t j = 0; j < 500; ++j) c.bias[j] = j % 2 == 0 ? 4096 : -4096;
    for (const Case& way : ways(c, 0.5)) {
      SCOPED_TRACE(describe(way));
      const Outputs got = solve(way);
      for (const auto* zero : {&got.d_hidden, &got.d_classifier, &got.d_bias}) {
        EXPECT_TRUE(std::all_of(zero->begin(), zero->end(), [](double v) { return v == 0; }));
      }
    }
  }
}

// The slope of a small softcap is that of the logit, however far lse is.
TEST_P(Infinities, SmallSoftcap) {
  Case c = plain(6, {8, 700, 5});
  c.problem.softcap = 0x1p-10;
  c.problem.scale = 0x1p-11;
  std::fill(c.bias.begin(), c.bias.end(), 0);
  for (const Case& way : ways(c, 0.5)) {
    SCOPED_TRACE(describe(way));
    const Expected expected(way);
    expect_gradients(solve(way), expected.truth(), expected.bounds_of(engine()));
  }
}

LOGITLESS_TEST_ON(Infinities, engines());

}  // namespace
}  // namespace logitless_test
