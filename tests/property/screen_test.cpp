// Sparsified gradients behind an 8-bit screen: exact where everything is kept, an honest error of the loss,
// the same bits for the same seed, and inputs that a screen does not like.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sparsified_fixture.h"

namespace logitless_test {
namespace {

// Probabilities below kKeepsAll are drawn.
constexpr double kLeastError = 1e-20;

class Screen : public SparsifiedTest {
 protected:
  void SetUp() override {
    SparsifiedTest::SetUp();
    if (IsSkipped()) return;
    const std::string why = why_not_screened();
    if (!why.empty()) GTEST_SKIP() << why;
  }

  static Case screened(Case c, double threshold, int64_t seed = 0) {
    c = as_sparsified(std::move(c), threshold, seed);
    c.problem.screen = LOGITLESS_SCREEN_FP8;
    c.mode = Mode::kForwardBackward;
    return c;
  }

  // A case that a screen takes, or none: without statistics of whole rows.
  static bool may_screen(Case* c) {
    logitless::Problem& p = c->problem;
    p.has.entropy = p.has.mean_logit = p.has.log_sum_sq_probs = p.has.argmax = 0;
    p.label_smoothing = 0;
    p.top_k = 0;
    p.batch_invariant = 0;
    return c->mode == Mode::kForwardBackward && p.targets_per_row == 0;
  }
};

TEST_P(Screen, IsExactWhereAllIsKept) {
  for (uint64_t seed = 0; seed < seeds(300); ++seed) {
    Case c = random_case(seed, {.largest_dimension = 300, .allow_fp64 = false});
    if (!may_screen(&c) || !engine().can_run(c.problem) || !engine().can_sparsify(c.problem)) continue;
    SCOPED_TRACE(describe(c));
    c = screened(c, kKeepsAll, 5);
    const Expected expected(c);
    const Outputs got = solve(c);
    expected.check(got, expected.bounds_of(engine()));
    for (double error : got.loss_error) EXPECT_FALSE(error > kLeastError) << error;
  }
}

// The estimated error of the loss is that of many seeds.
TEST_P(Screen, LossErrorIsTheStandardDeviation) {
  const bool slow = engine().is_reference();
  Case c = sparsified(slow ? PlainSize{6, 80, 8} : PlainSize{8, 600, 24}, slow ? 0x1p-3 : 0x1p-5);
  c.problem.scale = 2;
  const Expected expected(c);
  const int64_t count = is_emulated() ? 120 : slow || is_device() ? 300 : 1000;
  const auto rows = static_cast<size_t>(c.problem.tokens);
  std::vector<double> sum(rows), square(rows), variance(rows);
  double largest = 0;
  for (int64_t seed = 0; seed < count; ++seed) {
    const Outputs got = solve(screened(c, c.problem.threshold, seed));
    for (size_t i = 0; i < rows; ++i) {
      const double d = got.nll[i] - expected.truth().nll[i];
      sum[i] += d;
      square[i] += d * d;
      variance[i] += got.loss_error[i] * got.loss_error[i];
      largest = std::max(largest, got.loss_error[i]);
    }
  }
  const auto n = static_cast<double>(count);
  ASSERT_GT(largest, 1e-3);
  for (size_t i = 0; i < rows; ++i) {
    const double of_seeds = square[i] / n - std::pow(sum[i] / n, 2);
    // 5 standard deviations of a variance of nearly normal numbers, and 5% for draws that are systematic.
    EXPECT_NEAR(variance[i] / n / of_seeds, 1, 0.05 + 5 * std::sqrt(2 / n)) << i;
    EXPECT_LE(std::fabs(sum[i] / n), 5 * std::sqrt(of_seeds / n) + of_seeds) << i;
  }
}

TEST_P(Screen, ForwardAloneHasTheSameLoss) {
  Case c = sparsified({20, 700, 16}, 0x1p-5);
  c.targets[3] = c.problem.ignore_index;
  const Outputs both = solve(screened(c, 0x1p-5, 3));
  Case alone = screened(c, 0x1p-5, 3);
  alone.mode = Mode::kForward;
  const Outputs loss = solve(alone);
  EXPECT_EQ(loss.loss, both.loss);
  EXPECT_EQ(loss.nll, both.nll);
  EXPECT_EQ(loss.loss_error, both.loss_error);
  EXPECT_EQ(loss.loss_error[3], 0);
}

TEST_P(Screen, OutlierChannels) {
  Case c = sparsified({16, 400, 32}, 0x1p-5);
  for (int64_t i = 0; i < c.problem.tokens; ++i) c.hidden[static_cast<size_t>(i * 32 + 7)] = 60;
  c.problem.scale = 0.02;
  const Expected expected(c);
  double error = 0, spread = 0;
  const int64_t count = is_emulated() ? 16 : 64;
  const auto n = static_cast<double>(count);
  for (int64_t seed = 0; seed < count; ++seed) {
    const Outputs got = solve(screened(c, 0x1p-5, seed));
    error += (got.loss[0] - expected.truth().loss[0]) / n;
    for (double e : got.loss_error) spread += e * e / n;
  }
  const double of_mean = std::sqrt(spread / n) / static_cast<double>(c.problem.tokens);
  EXPECT_GT(of_mean, 0);
  EXPECT_LE(std::fabs(error), 5 * of_mean + spread);
}

// Logits of thousands: an 8-bit one is off by hundreds. Nothing is infinite or lost.
TEST_P(Screen, LargeLogits) {
  Case c = sparsified({8, 300, 16}, 0x1p-5);
  c.problem.scale = 4000;
  const Outputs got = solve(screened(c, 0x1p-5, 1));
  for (const auto& values : {got.nll, got.loss_error, got.d_hidden, got.d_weight}) {
    for (double value : values) EXPECT_TRUE(std::isfinite(value));
  }
  for (double value : got.nll) EXPECT_GE(value, -1e-3 * 4000);
}

// Rows of (2^21, 1): the second channel vanishes in 8 bits, and all 8-bit logits of these weights are 0.
Case blind(const Case& like, double of_other_columns) {
  Case c = like;
  for (size_t i = 0; i < c.hidden.size(); ++i) c.hidden[i] = i % 2 == 0 ? 0x1p21 : 1;
  for (size_t i = 0; i < c.weight.size(); ++i) c.weight[i] = i % 2 == 0 ? 0 : of_other_columns;
  return c;
}

TEST_P(Screen, AnElementThatTheScreenUnderratesFarIsFinite) {
  Case c = blind(sparsified({8, 4096, 2}, 0x1p-9), 0);
  c.weight[2 * 200 + 1] = 200;
  double largest = 0;
  for (int64_t seed = 0; seed < (is_device() ? 4 : 20); ++seed) {
    Case drawn = screened(c, 0x1p-9, seed);
    drawn.problem.has.draw_variance = 1;
    const Outputs got = solve(drawn);
    for (const auto& values : {got.nll, got.loss_error, got.d_hidden, got.d_weight, got.draw_variance}) {
      for (double value : values) EXPECT_TRUE(std::isfinite(value));
    }
    largest = std::max(largest, *std::max_element(got.nll.begin(), got.nll.end()));
  }
  EXPECT_GT(largest, 100);  // some row has drawn it
}

TEST_P(Screen, TheLossIsNoLessThanItsKnownPart) {
  Case c = blind(sparsified({8, 4096, 2}, 0x1p-9), -5);
  std::fill(c.targets.begin(), c.targets.end(), 3);
  c.weight[2 * 3 + 1] = 7.5;
  for (int64_t seed = 0; seed < (is_device() ? 4 : 20); ++seed) {
    for (double value : solve(screened(c, 0x1p-9, seed)).nll) EXPECT_GE(value, -1e-3);
  }
}

// Products then have no part in the gradients, and memory of the gradients is cleared early.
TEST_P(Screen, ScaleOfZero) {
  Case c = sparsified({8, 300, 32}, 0x1p-5);
  c.problem.scale = 0;
  c = screened(c, kKeepsAll, 1);
  const Expected expected(c);
  expected.check(solve(c), expected.bounds_of(engine()));
}

TEST_P(Screen, NoNumbersStayTheirRows) {
  for (const double bad : {NAN, INFINITY, -INFINITY}) {
    Case c = sparsified({8, 300, 16}, 0x1p-5);
    c.hidden[2 * 16 + 5] = bad;
    const Outputs got = solve(screened(c, 0x1p-5, 1));
    for (size_t i = 0; i < 8; ++i) {
      EXPECT_EQ(std::isfinite(got.nll[i]), i != 2) << bad << " " << i;
      EXPECT_EQ(std::isfinite(got.loss_error[i]), i != 2) << bad << " " << i;
    }
    EXPECT_TRUE(std::isnan(got.loss[0]));
  }
}

TEST_P(Screen, RowsOfZerosAndOfOnlyIgnoredTargets) {
  Case c = sparsified({5, 40, 16}, 0x1p-3);
  std::fill(c.hidden.begin(), c.hidden.end(), 0);
  c = screened(c, kKeepsAll, 1);
  const Expected expected(c);
  expected.check(solve(c), expected.bounds_of(engine()));
  std::fill(c.targets.begin(), c.targets.end(), c.problem.ignore_index);
  const Outputs got = solve(screened(c, 0x1p-3, 1));
  for (double value : got.loss_error) EXPECT_EQ(value, 0);
  for (double value : got.d_hidden) EXPECT_EQ(value, 0);
}

TEST_P(Screen, Refusals) {
  const auto message = [&](auto change) {
    const Case c = screened(sparsified({4, 30, 8}, 0x1p-3), 0x1p-3);
    logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
    change(problem);
    try {
      const logitless::Plan plan(context_, problem);
    } catch (const logitless::Error& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  using P = logitless::Problem&;
  EXPECT_EQ(message([](P) {}), "none");
  const auto names = [&](const char* name, auto change) {
    EXPECT_NE(message(change).find(std::string(name) + ": expected"), std::string::npos) << message(change);
  };
  names("screen", [](P p) { p.gradient = LOGITLESS_EXACT; });
  names("screen", [](P p) { p.pass = LOGITLESS_BACKWARD; });
  names("screen", [](P p) { p.has.saved = 1; });
  names("label_smoothing", [](P p) { p.label_smoothing = 0.1; });
  names("entropy", [](P p) { p.has.entropy = 1; });
  names("argmax", [](P p) { p.has.argmax = 1; });
  names("mean_logit", [](P p) { p.has.mean_logit = 1; });
  names("batch_invariant", [](P p) { p.batch_invariant = 1; });
  names("top_k", [](P p) { p.top_k = 2; });
  names("screen", [](P p) { p.group_size = 2; });
  names("screen", [](P p) { p.vocab_total = 60; });
}

LOGITLESS_TEST_ON(Screen, engines());

}  // namespace
}  // namespace logitless_test
