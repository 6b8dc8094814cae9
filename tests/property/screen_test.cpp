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

// A case whose run writes the rounded weight; and the same one reading that of a run.
Case writing(Case c) {
  c.problem.has.screen_weight = 1;
  return c;
}
Case reading(Case c, const Outputs& written) {
  c = writing(std::move(c));
  c.screen_weight = written.screen_weight;
  c.problem.screen_weight_bytes = 4 * written.screen_weight.size();
  return c;
}

// The whole weight is rounded at once, or in windows beside gradients that are added to and rows that begin
// anywhere. Neither way, nor who has rounded it, changes a bit. On the portable engine windows do.
TEST_P(Screen, AKeptWeightChangesNoBit) {
  const auto all_equal = [&](const Case& c) {
    SCOPED_TRACE(describe(c));
    const Outputs plain = solve(c), written = solve(writing(c));
    const bool in_windows = c.d_weight_layout.skew != 0 && c.problem.vocab > 768;
    if (engine().name() != "cuda_portable" || !in_windows) {
      EXPECT_STREQ(first_difference(plain, written), "");
    }
    if (c.problem.tokens > 0) {
      ASSERT_FALSE(written.screen_weight.empty());
    }
    const Outputs read = solve(reading(c, written));
    EXPECT_STREQ(first_difference(written, read), "");
  };
  for (Case& c : random_cases(100, seeds(60), {.largest_dimension = 300, .allow_fp64 = false},
                              [&](Case* c) { return may_screen(c) && engine().can_sparsify(c->problem); })) {
    all_equal(screened(std::move(c), 0x1p-4, 5));
  }
  const PlainSize sizes[] = {{1, 1, 1}, {3, 7, 17}, {130, 200, 16}, {5, 2000, 24}, {2, 1601, 513}};
  for (const PlainSize& size : sizes) {
    Case c = screened(sparsified(size, 0x1p-5), 0x1p-5, 2);
    all_equal(c);
    c.mode = Mode::kForward;
    all_equal(c);
    c.mode = Mode::kForwardBackward;
    c.weight_layout = {.padding = 5, .skew = 3};
    c.d_weight_layout = {.padding = 1, .skew = 1};
    all_equal(c);
    c.problem.accumulate.d_weight = 1;
    c.d_weight_start.assign(c.weight.size(), 0.25);
    all_equal(c);
  }
}

// A run over some rows reads what one over others wrote, also one whose rows are all ignored.
TEST_P(Screen, AKeptWeightServesOtherRows) {
  const Case all = screened(sparsified({40, 500, 24}, 0x1p-5), 0x1p-5, 3);
  Case first = all;
  std::fill(first.targets.begin(), first.targets.end(), first.problem.ignore_index);
  const Outputs written = solve(writing(first));
  EXPECT_EQ(written.screen_weight, solve(writing(all)).screen_weight);
  const Case few = rows_of(all, {7, 1, 30});
  for (const Case* c : {&all, &few}) {
    EXPECT_STREQ(first_difference(solve(*c), solve(reading(*c, written))), "");
  }
  Case none = writing(rows_of(all, {}));
  EXPECT_TRUE(solve(none).screen_weight.empty());
  none.problem.screen_weight_bytes = 4 * written.screen_weight.size();
  none.screen_weight = written.screen_weight;
  solve(none);
  for (const double bad : {NAN, INFINITY}) {
    Case c = all;
    c.weight[24 * 17 + 3] = bad;
    const Outputs plain = solve(c), kept = solve(writing(c));
    EXPECT_STREQ(first_difference(plain, kept), "") << bad;
    EXPECT_STREQ(first_difference(plain, solve(reading(c, kept))), "") << bad;
  }
}

TEST_P(Screen, AKeptWeightCountsInTheBudget) {
  const Case c = writing(screened(sparsified({16, 300, 16}, 0x1p-5), 0x1p-5));
  logitless::Problem p = pass_problem(c, logitless::Pass::forward_backward);
  p.max_workspace_bytes = 1;
  const logitless::Error error = refusal([&] { const logitless::Plan plan(context_, p); });
  EXPECT_NE(std::string(error.what()).find("screen_weight of "), std::string::npos) << error.what();
  p.max_workspace_bytes = error.required_bytes;
  const logitless::PlanInfo info = logitless::Plan(context_, p).info();
  EXPECT_EQ(info.workspace_bytes + info.screen_weight_bytes, error.required_bytes);
  EXPECT_GE(info.screen_weight_bytes, static_cast<uint64_t>(is_device() ? 300 * 16 : 300));
  p.has.screen_weight = 0;
  p.max_workspace_bytes = 0;
  EXPECT_EQ(logitless::Plan(context_, p).info().screen_weight_bytes, 0U);
}

TEST_P(Screen, AKeptWeightOfAnotherSizeIsRefused) {
  const auto planned = [&](PlainSize size) {
    return pass_problem(writing(screened(sparsified(size, 0x1p-5), 0x1p-5)),
                        logitless::Pass::forward_backward);
  };
  const auto refused = [&](logitless::Problem p, uint64_t bytes) {
    p.screen_weight_bytes = bytes;
    const logitless::Error error = refusal([&] { const logitless::Plan plan(context_, p); });
    EXPECT_EQ(error.argument, "screen_weight_bytes");
    return error.required_bytes;
  };
  logitless::Problem p = planned({16, 300, 16});
  const uint64_t size = logitless::Plan(context_, p).info().screen_weight_bytes;
  for (const uint64_t bytes : {uint64_t{1}, size - 4, size + 64, uint64_t{INT64_MAX}}) {
    EXPECT_EQ(refused(p, bytes), size);
  }
  EXPECT_NE(refused(planned({16, 301, 16}), size), size);
  if (is_device()) refused(planned({16, 300, 17}), size);
  p.screen_weight_bytes = size;
  const logitless::Plan plan(context_, p);
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
  names("screen_weight_bytes", [](P p) { p.screen_weight_bytes = 64; });
  names("screen_weight", [](P p) { p.has.screen_weight = 1, p.screen = 0; });
}

LOGITLESS_TEST_ON(Screen, engines());

}  // namespace
}  // namespace logitless_test
