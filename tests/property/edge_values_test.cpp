// Numbers at the edges: huge logits, infinities, NaN, the ends of the 16-bit formats, and a softcap that is
// reached. Infinities and NaN give what PyTorch makes of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class EdgeValues : public EngineTest {};

// |logit| is about 1e4: exp of it overflows everything, but the loss must not.
TEST_P(EdgeValues, HugeLogits) {
  for (double sign : {1.0, -1.0}) {
    for (bool smoothing : {false, true}) {
      // sm90's kernels of such a depth work in another way.
      Case c =
          plain(5, engine().engine == "sm90" && smoothing ? PlainSize{17, 300, 3080} : PlainSize{17, 300, 9});
      c.problem.scale = sign * 3000;
      c.problem.label_smoothing = smoothing ? 0.1 : 0;
      c.problem.has.entropy = c.problem.has.argmax = 1;
      const Expected expected(c);
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        c.mode = mode;
        const Outputs got = solve(c);
        EXPECT_TRUE(all_finite(got.lse));
        EXPECT_TRUE(all_finite(got.d_hidden));
        expected.check(engine(), got);
      }
    }
  }
}

// The bias makes all of a row's logits huge and of one sign: nothing but their differences matters.
TEST_P(EdgeValues, HugeCommonLogit) {
  for (double common : {1e4, -1e4, 1e9, -1e9, 3e38, -3e38}) {
    Case c = plain(6, {9, 40, 5});
    c.problem.scale = 0;
    c.problem.dtype.bias = c.problem.dtype.d_bias = LOGITLESS_F32;
    std::fill(c.bias.begin(), c.bias.end(), rounded(common, LOGITLESS_F32));
    const Outputs got = solve(c);
    for (double nll : got.nll)
      EXPECT_NEAR(nll, std::log(40.0), 0x1p-24 * std::max(4.0, 2 * std::fabs(common)));
    for (double max : got.max) EXPECT_EQ(max, rounded(common, LOGITLESS_F32));
    for (double sum : got.sum_exp) EXPECT_EQ(sum, 40);
  }
}

// One winner is far ahead: the loss of its rows is 0 or the gap, gradients are 0 or 1.
TEST_P(EdgeValues, Saturated) {
  Case c = plain(7, {2, 300, 1});
  std::fill(c.hidden.begin(), c.hidden.end(), 1);
  std::fill(c.weight.begin(), c.weight.end(), 0);
  std::fill(c.bias.begin(), c.bias.end(), 0);
  c.weight[123] = 9984;  // bfloat16 has it
  c.targets = {123, 7};
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  const Outputs got = solve(c);
  EXPECT_EQ(got.nll[0], 0);
  EXPECT_EQ(got.nll[1], 9984);
  for (size_t j = 0; j < 300; ++j) EXPECT_EQ(got.d_bias[j], j == 123 ? 1 : (j == 7 ? -1 : 0)) << j;
  EXPECT_EQ(got.d_hidden, (std::vector<double>{0, 9984}));
}

// Some rows are sure of their target, with a loss far below the rounding of a logit. Others all but exclude
// it.
TEST_P(EdgeValues, TinyAndLargeLosses) {
  const std::vector<double> below = {30, 20, 16, 12, 8, 2, -2, -20, -60, -80, -92};
  const int64_t rows = static_cast<int64_t>(below.size());
  Case c = plain(9, {rows, 4, 2});
  std::fill(c.bias.begin(), c.bias.end(), 0);
  for (size_t i = 0; i < below.size(); ++i) {
    c.hidden[2 * i] = below[i];
    c.hidden[2 * i + 1] = 17.25;
  }
  for (size_t j = 0; j < 4; ++j) {
    c.weight[2 * j] = j == 1 ? 0 : -1;
    c.weight[2 * j + 1] = 1;
  }
  c.targets.assign(below.size(), 1);
  const Expected expected(c);
  for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
    c.mode = mode;
    const Outputs got = solve(c);
    expected.check(engine(), got);
    for (size_t i = 0; i < below.size(); ++i) {
      const double nll = std::log1p(3 * std::exp(-below[i]));
      // Sums of 4 terms in fp32, whose exponents are rounded.
      EXPECT_NEAR(got.nll[i], nll, 0x1p-22 + 0x1p-21 * nll) << below[i];
    }
  }
}

// Rows that are sure of their target have no loss, however the rounding of its logit of many terms: lse is
// rounded as it is.
TEST_P(EdgeValues, CertainTargets) {
  constexpr int64_t kTokens = 5, kVocab = 700, kHidden = 1200;
  const logitless_dtype dtype = engine().plain_dtype();
  Case c = plain(15, {kTokens, kVocab, kHidden});
  std::fill(c.bias.begin(), c.bias.end(), 0);
  double square = 0;
  for (double x : c.weight) square += x * x / kVocab;
  c.targets = {0, 3, 180, 255, 699};
  for (size_t i = 0; i < c.targets.size(); ++i) {
    for (size_t k = 0; k < kHidden; ++k) {
      const double of_target = c.weight[static_cast<size_t>(c.targets[i]) * kHidden + k];
      c.hidden[i * kHidden + k] = rounded(85 / square * of_target, dtype);
    }
  }
  std::vector<Case> cases = {c};
  if (why_not_sparsified(engine()).empty()) {
    c.problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
    c.problem.threshold = 0x1p-8;
    cases.push_back(c);
    c.problem.has.saved = 1;
    cases.push_back(c);
  }
  for (Case& each : cases) {
    for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
      each.mode = mode;
      const Outputs got = solve(each);
      for (size_t i = 0; i < c.targets.size(); ++i) EXPECT_NEAR(got.nll[i], 0, 0x1p-22) << i;
      for (double d : got.d_bias) EXPECT_NEAR(d, 0, 0x1p-20);
    }
  }
}

// NaN or infinity in one token's hidden row stays in its row. On a device other rows may be computed again,
// from another logit offset; they stay the same but for rounding.
TEST_P(EdgeValues, NonFiniteHiddenRow) {
  for (logitless_dtype dtype : {engine().plain_dtype(), LOGITLESS_BF16, LOGITLESS_F16}) {
    for (double bad : {kNaN, kInfinity, -kInfinity}) {
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        constexpr size_t kTokens = 37, kHidden = 11, kBadRow = 17;
        Case c = plain_case(10, {kTokens, 300, kHidden}, dtype);
        c.mode = mode;
        c.problem.reduction = LOGITLESS_REDUCTION_NONE;
        c.grad_loss.assign(kTokens, 1);
        const Outputs before = solve(c);
        const Bounds rounding = is_device() ? 2 * Expected(c).bounds_of(engine()) : Bounds{};
        const auto expect_same = [&](double x, double y, double error, logitless_dtype format) {
          const double unit = is_device() ? 2 * rounding_unit(format) : 0;
          EXPECT_LE(std::fabs(x - y), error + unit * std::fabs(y));
        };
        c.hidden[kBadRow * kHidden + 3] = bad;
        const Outputs after = solve(c);
        for (size_t i = 0; i < kTokens; ++i) {
          SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << bad << " row " << i);
          if (i == kBadRow) {
            EXPECT_FALSE(std::isfinite(after.loss[i]));
            EXPECT_FALSE(std::isfinite(after.lse[i]));
          } else {
            expect_same(after.loss[i], before.loss[i], rounding.loss, LOGITLESS_F32);
          }
          bool finite = true;
          for (size_t k = i * kHidden; k < (i + 1) * kHidden; ++k) {
            finite = finite && std::isfinite(after.d_hidden[k]);
            if (i != kBadRow) {
              expect_same(after.d_hidden[k], before.d_hidden[k], rounding.d_hidden, dtype);
            }
          }
          EXPECT_EQ(finite, i != kBadRow);
        }
        EXPECT_FALSE(all_finite(after.d_weight));  // never hidden: a trainer must see it
      }
    }
  }
}

// A NaN in the weight is in every row's logits, so in every loss.
TEST_P(EdgeValues, NaNInTheWeight) {
  Case c = plain(11, {5, 300, 4});
  c.problem.reduction = LOGITLESS_REDUCTION_NONE;
  for (size_t column : {size_t{0}, size_t{150}, size_t{299}}) {
    Case bad = c;
    bad.weight[column * 4 + 1] = NAN;
    const Outputs got = solve(bad);
    EXPECT_TRUE(all_are(kNaN, got.loss) && all_are(kNaN, got.d_hidden)) << "column " << column;
  }
}

// Covers the largest and the smallest numbers of the 16-bit formats.
TEST_P(EdgeValues, EndsOfTheFormats) {
  for (logitless_dtype dtype : {LOGITLESS_F16, LOGITLESS_BF16}) {
    Case c = plain_case(12, {9, 40, 6}, dtype);
    const double smallest = 2 * subnormal_unit(dtype);
    const double largest = dtype == LOGITLESS_F16 ? 65504 : 0x1.fep15;
    for (size_t i = 0; i < c.hidden.size(); ++i)
      c.hidden[i] = i % 3 == 0 ? largest : static_cast<double>(i % 5) * smallest;
    for (double& value : c.weight) value = rounded(value * 1e-5, dtype);
    c.problem.dtype.d_hidden = c.problem.dtype.d_weight = LOGITLESS_F32;
    Expected(c).check(engine(), solve(c));
  }
}

// The first of equal largest logits wins, wherever a block ends.
TEST_P(EdgeValues, ArgmaxOfEqualLogits) {
  for (int64_t first : {0, 1, 255, 256, 299, 512, 599}) {
    Case c = plain(13, {3, 600, 4});
    c.problem.has.argmax = 1;
    std::fill(c.weight.begin(), c.weight.end(), 0);
    std::fill(c.bias.begin(), c.bias.end(), 0);
    for (size_t j = static_cast<size_t>(first); j < 600; ++j) c.bias[j] = 1;
    c.targets = {first, first, 598};
    const Outputs got = solve(c);
    EXPECT_EQ(got.argmax, std::vector<double>(3, static_cast<double>(first)));
    EXPECT_EQ(got.correct_count, std::vector<double>{first == 598 ? 3.0 : 2.0});
  }
}

// A target that is no class is refused before anything is written, where the host sees it. On a device its
// row is NaN, it adds to no gradient, and the run reports it.
TEST_P(EdgeValues, TargetOutOfRange) {
  for (int64_t bad :
       {int64_t{40}, int64_t{-1}, int64_t{1} << 30, int64_t{1} << 40, INT64_MIN, int64_t{1} << 62}) {
    for (int32_t reduction : {LOGITLESS_REDUCTION_NONE, LOGITLESS_REDUCTION_SUM, LOGITLESS_REDUCTION_MEAN}) {
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        SCOPED_TRACE(testing::Message() << bad << ", reduction " << reduction);
        Case c = plain(14, {9, 40, 8});
        c.mode = mode;
        c.problem.reduction = reduction;
        c.problem.num_items = reduction == LOGITLESS_REDUCTION_MEAN ? 9 : 0;
        if (reduction == LOGITLESS_REDUCTION_NONE) c.grad_loss.assign(9, 1);
        Case without = c;
        for (size_t row : {size_t{3}, size_t{7}}) {
          c.targets[row] = bad;
          without.targets[row] = c.problem.ignore_index;
        }
        if (!is_device()) {
          EXPECT_EQ(refusal([&] { solve(c); }).status(), LOGITLESS_INVALID_TARGET);
          continue;
        }
        const Outputs got = solve(c);
        const Outputs expected = solve(without);
        EXPECT_EQ(got.invalid_targets, (std::vector<double>{2, 3}));
        EXPECT_EQ(got.valid_count, expected.valid_count);
        std::vector<const std::vector<double>*> of_rows = {&got.nll, &got.lse};
        if (reduction == LOGITLESS_REDUCTION_NONE) {
          of_rows.push_back(&got.loss);
        } else {
          EXPECT_TRUE(std::isnan(got.loss[0]));
        }
        for (size_t i = 0; i < 9; ++i) {
          const bool is_bad = i == 3 || i == 7;
          for (const auto* values : of_rows) EXPECT_EQ(std::isnan((*values)[i]), is_bad);
          if (!is_bad) {
            EXPECT_EQ(got.nll[i], expected.nll[i]);
          }
        }
        EXPECT_EQ(got.d_hidden, expected.d_hidden);
        EXPECT_EQ(got.d_weight, expected.d_weight);
        EXPECT_EQ(got.d_bias, expected.d_bias);
      }
    }
  }
}

LOGITLESS_TEST_ON(EdgeValues, engines());

class Infinities : public EngineTest {
 protected:
  Case plain(uint64_t seed, PlainSize size) const {
    Case c = EngineTest::plain(seed, size);
    c.problem.dtype.d_hidden = c.problem.dtype.d_weight = c.problem.dtype.d_bias = LOGITLESS_F32;
    return c;
  }
};

// A masked target costs infinity in its own row, whose gradient is finite: p = 0 there as in any other masked
// column, and -1 at the target.
TEST_P(Infinities, MaskedTarget) {
  Case c = plain(9, {6, 50, 4});
  c.targets = {1, 2, 3, 4, 5, 6};
  Case finite = c;  // has the same gradients
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

// A logit of +inf, the target's or another, makes loss and gradients of its row NaN, as in PyTorch.
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
        EXPECT_TRUE(all_are(kNaN, *nan));
      }
      EXPECT_EQ(got.argmax, std::vector<double>(3, static_cast<double>(column)));
    }
  }
}

// Masked columns have probability 0, no part in what is summed over probabilities, and no gradient. The mean
// over all logits is -inf. Some masked columns fill a whole block.
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
      for (size_t k = 4 * j; k < 4 * j + 4; ++k) EXPECT_EQ(got.d_weight[k], 0);
    }
  }
}

// The argmax of a row with NaN is the first NaN.
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

// Without label smoothing nobody reads the weight of a class that is no target, which is infinite where it is
// the inverse of a count of 0.
TEST_P(Infinities, WeightsOfUnusedClasses) {
  Case c = plain(7, {6, 90, 4});
  c.problem.has.class_weight = 1;
  c.targets = {1, 2, 3, 1, 2, 3};
  c.class_weight.assign(90, 1.5);
  const std::vector<Case> finite = ways(c, 0.5);
  for (double weight : {kInfinity, -kInfinity, kNaN}) {
    std::fill(c.class_weight.begin() + 4, c.class_weight.end(), weight);
    size_t at = 0;
    for (const Case& way : ways(c, 0.5)) {
      SCOPED_TRACE(describe(way));
      const Outputs got = solve(way), expected = solve(finite[at++]);
      for (const auto member : {&Outputs::loss, &Outputs::d_hidden, &Outputs::d_weight, &Outputs::d_bias}) {
        EXPECT_EQ(got.*member, expected.*member);
      }
    }
  }
}

// There is no gradient at all where tanh is 1.
TEST_P(Infinities, SaturatedSoftcap) {
  for (double softcap : {1e-3, 0.3, 5.0, 30.1}) {
    Case c = plain(5, {4, 500, 3});
    c.problem.softcap = softcap;
    for (size_t j = 0; j < 500; ++j) c.bias[j] = j % 2 == 0 ? 4096 : -4096;
    for (const Case& way : ways(c, 0.5)) {
      SCOPED_TRACE(describe(way));
      const Outputs got = solve(way);
      for (const auto* zero : {&got.d_hidden, &got.d_weight, &got.d_bias}) {
        EXPECT_TRUE(all_are(0, *zero));
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
