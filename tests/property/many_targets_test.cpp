// Several targets a row: class probabilities, several right classes, log-probabilities of given ids.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "compare.h"
#include "formats.h"

namespace logitless_test {
namespace {

class ManyTargets : public testing::TestWithParam<Engine> {
 protected:
  Case plain(uint64_t seed, PlainSize size, int64_t count) const {
    Case c = plain_case(seed, size, GetParam().plain_dtype());
    Random random(seed);
    give_targets(random, &c, count, 0, 1);
    return c;
  }

  void check(const Case& c, size_t budget = 0) const {
    Expected(c).check(GetParam(), solve(context_, c, budget));
  }

  logitless::Context context_ = make_context(GetParam());
};

// Over all options, with weights of both signs, all of one sign, and none.
TEST_P(ManyTargets, AgreeWithTheOracle) {
  uint64_t done = 0;
  for (uint64_t seed = 9000; done < seeds(300); ++seed) {
    Case c = random_case(seed, {.most_products = 60'000, .allow_fp64 = GetParam().has_float64()});
    if (!GetParam().can_run(c.problem)) continue;
    Random random(seed);
    const double low = random.pick<double>({-1, 0, 0});
    give_targets(random, &c, random.pick<int64_t>({1, 1, 2, 3, 8, 63, 64}), low, 1.5);
    if (random.chance(0.3)) c.target_weight.clear();
    check(c);
    ++done;
  }
}

TEST_P(ManyTargets, UnderEveryBudgetSlow) {
  for (const int64_t count : {1, 5, 64}) {
    for (const logitless_dtype dtype : {GetParam().plain_dtype(), LOGITLESS_BF16}) {
      Case c = plain_case(static_cast<uint64_t>(count), {130, is_slowed_down() ? 300 : 1100, 24}, dtype);
      Random random(7);
      give_targets(random, &c, count, 0, 1);
      for (int64_t i = 0; i < 20 * count; ++i) c.targets[static_cast<size_t>(i)] = c.problem.ignore_index;
      const Expected expected(c);
      const logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
      const Outputs most = solve(context_, c);
      std::set<size_t> budgets;
      size_t least = most.workspace_bytes;
      for (const logitless::PlanInfo& plan : context_.plans(problem)) {
        budgets.insert(plan.workspace_bytes);
        least = std::min(least, plan.workspace_bytes);
      }
      for (auto budget = static_cast<double>(least); budget < static_cast<double>(most.workspace_bytes);
           budget *= 1.6) {
        budgets.insert(static_cast<size_t>(std::ceil(budget)));
      }
      for (const size_t budget : budgets) {
        SCOPED_TRACE(budget);
        const Outputs got = solve(context_, c, budget);
        expected.check(GetParam(), got);
        if (!GetParam().is_device()) {
          EXPECT_STREQ(first_difference(got, most), "");
        }
      }
    }
  }
}

// One of the weight 1 is the target of an ordinary row.
TEST_P(ManyTargets, OneIsTheTargetOfAnOrdinaryRow) {
  for (const Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kForwardThenBackward}) {
    Case one = plain_case(3, {70, 903, 20}, GetParam().plain_dtype());
    one.mode = mode;
    if (mode == Mode::kForward) {
      one.problem.has.d_hidden = one.problem.has.d_classifier = one.problem.has.d_bias = 0;
    }
    Case many = one;
    many.problem.targets_per_row = 1;
    Outputs ordinary = solve(context_, one), got = solve(context_, many);
    if (GetParam().is_device()) {
      expect_same_results(one, ordinary, got, Expected(one).bounds_of(GetParam()));
      continue;
    }
    for (size_t row = 0; row < 70 && !got.target_log_probs.empty(); ++row) {
      EXPECT_EQ(got.target_log_probs[row], -got.nll[row]);
    }
    got.target_log_probs.clear();
    EXPECT_STREQ(first_difference(ordinary, got), "") << static_cast<int>(mode);
  }
}

// The same target again is one target of both weights, in whatever order.
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
    check(c);
    Case once = c;
    once.problem.targets_per_row = 1;
    once.targets.clear();
    for (size_t row = 0; row < 40; ++row) once.targets.push_back(c.targets[4 * row]);
    once.target_weight.assign(40, 2.5);
    Outputs many = solve(context_, c), one = solve(context_, once);
    many.target_log_probs.clear();
    one.target_log_probs.clear();
    if (!GetParam().is_device()) {
      EXPECT_STREQ(first_difference(many, one), "");
    }
  }
}

// Of a row whose weights add up to 0 only the targets have a gradient, also where one of them is very
// unlikely. Where a device has kept exps, the other columns get 2^-30 of a weight.
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
      Bounds bounds = expected.tightest_bounds_of(GetParam());
      if (GetParam().is_device()) {
        for (double Bounds::*each : {&Bounds::d_hidden, &Bounds::d_classifier, &Bounds::d_bias})
          bounds.*each += 0x1p-28;
      }
      for (const Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        c.mode = mode;
        expected.check(solve(context_, c), bounds);
      }
    }
  }
}

// The gradients of log-probabilities are those of a sum of losses with the upstream gradients as weights.
TEST_P(ManyTargets, GradientsOfLogProbabilities) {
  Case c = plain(6, {24, 301, 12}, 7);
  Random random(8);
  c.mode = Mode::kForwardThenBackward;
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  c.grad_loss = {-1};
  for (double& weight : c.target_weight) weight = rounded(random.uniform(-1, 1), LOGITLESS_F32);
  const Outputs got = solve(context_, c);
  const Expected expected(c);
  expected.check(GetParam(), got);
  // d/dE of sum_ik u_ik log p_i,id_ik, from all probabilities: u_ik (C_id - sum_j p_ij C_j)
  const logitless::Problem& p = c.problem;
  const auto tokens = static_cast<size_t>(p.tokens), dim = static_cast<size_t>(p.hidden),
             vocab = static_cast<size_t>(p.vocab);
  std::vector<double> d_hidden(tokens * dim);
  for (size_t i = 0; i < tokens; ++i) {
    for (int64_t k = 0; k < 7; ++k) {
      const int64_t id = c.target_of(static_cast<int64_t>(i), k);
      if (id == p.ignore_index) continue;
      const double upstream = c.target_weight_of(static_cast<int64_t>(i), k);
      for (size_t j = 0; j < vocab; ++j) {
        const double probability = std::exp(expected.truth().logits[i * vocab + j] - expected.truth().lse[i]);
        const double d = upstream * ((static_cast<int64_t>(j) == id ? 1 : 0) - probability);
        for (size_t m = 0; m < dim; ++m) d_hidden[i * dim + m] += d * c.classifier[j * dim + m];
      }
    }
  }
  EXPECT_TRUE(close("d_hidden", got.d_hidden, d_hidden, expected.bounds_of(GetParam()).d_hidden,
                    as_dtype(p.dtype.d_hidden)));
}

TEST_P(ManyTargets, OfHostileShapes) {
  for (const PlainSize& size : {PlainSize{1, 1, 1}, PlainSize{0, 5, 3}, PlainSize{1, 3, 7},
                                PlainSize{65, 2, 1}, PlainSize{3, 449, 33}}) {
    for (const int64_t count : {1, 2, 64}) {
      Case c = plain(static_cast<uint64_t>(size.vocab), size, count);
      check(c);
      c.problem.reduction = LOGITLESS_REDUCTION_NONE;
      check(c);
      c.hidden_layout = c.d_hidden_layout = {.padding = 5, .skew = 3};
      c.classifier_layout = c.d_classifier_layout = {.padding = 1, .skew = 1};
      c.skew = 3;
      check(c);
    }
  }
}

TEST_P(ManyTargets, AllIgnored) {
  Case c = plain(9, {20, 130, 8}, 3);
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  std::fill(c.targets.begin(), c.targets.end(), c.problem.ignore_index);
  const Outputs got = solve(context_, c);
  EXPECT_EQ(got.loss, std::vector<double>{0});
  EXPECT_EQ(got.target_log_probs, std::vector<double>(60, 0));
  EXPECT_EQ(got.d_hidden, std::vector<double>(20 * 8, 0));
}

// A probability of nearly one: p - q keeps its digits.
TEST_P(ManyTargets, OfNearlyCertainRows) {
  Case c = plain(10, {16, 260, 8}, 2);
  for (size_t row = 0; row < 16; ++row) {
    c.targets[2 * row + 1] = c.problem.ignore_index;
    c.target_weight[2 * row] = 1;
    if (c.targets[2 * row] == c.problem.ignore_index) continue;
    const auto y = static_cast<size_t>(c.targets[2 * row]);
    for (size_t k = 0; k < 8; ++k) c.hidden[8 * row + k] = 64 * c.classifier[8 * y + k];
  }
  const Expected expected(c);
  Bounds bounds = expected.tightest_bounds_of(GetParam());
  if (GetParam()
          .is_device()) {  // a target's logit is a sum of its own there, with an error beside that of lse
    for (double Bounds::*each : {&Bounds::d_hidden, &Bounds::d_classifier, &Bounds::d_bias})
      bounds.*each *= 2;
  }
  expected.check(solve(context_, c), bounds);
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
  const Outputs got = solve(context_, c);
  EXPECT_TRUE(std::isfinite(got.loss[0]));
  for (const auto* values : {&got.nll, &got.d_hidden, &got.d_classifier, &got.d_bias}) {
    for (const double value : *values) ASSERT_TRUE(std::isfinite(value));
  }
  for (size_t row = 0; row < 10; ++row) EXPECT_EQ(got.target_log_probs[3 * row + 1], -INFINITY);
}

TEST_P(ManyTargets, TheSameBitsForAnyThreads) {
  if (GetParam().is_device()) GTEST_SKIP() << "of engines on the host";
  const Case c = plain(12, {200, 1500, 16}, 9);
  const Outputs one = solve(make_context(GetParam(), 1), c);
  for (const int threads : {2, 3, 7}) {
    EXPECT_STREQ(first_difference(one, solve(make_context(GetParam(), threads), c)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, ManyTargets, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
