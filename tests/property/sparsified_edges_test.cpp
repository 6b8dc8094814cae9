// Sparsified gradients at the edges of shapes, of probabilities and of numbers, where every run ends; and
// refusals. A run that does not end takes longer than ctest allows this program.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "formats.h"
#include "sparsified_fixture.h"

namespace logitless_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity(),
                 kNaN = std::numeric_limits<double>::quiet_NaN();

class SparsifiedEdges : public SparsifiedTest {
 protected:
  PlainSize reduced(PlainSize size) const {
    if (engine().is_reference()) size.vocab = std::min<int64_t>(size.vocab, 500);
    return size;
  }
};

TEST_P(SparsifiedEdges, SmallestShapes) {
  for (PlainSize size : {PlainSize{1, 1, 1}, PlainSize{1, 300, 3}, PlainSize{40, 1, 2}, PlainSize{0, 5, 2},
                         PlainSize{1, 2, 1}}) {
    for (double threshold : {1.0, 0x1p-10, 1e-30}) {
      const Case c = sparsified(size, threshold);
      const Answer truth = materialise<double>(c);
      for (const Outputs& got : all_ways(c)) {
        EXPECT_EQ(got.kept_count.size(), static_cast<size_t>(size.tokens));
        if (size.vocab == 1) {
          for (double kept : got.kept_count) EXPECT_EQ(kept, 1);
        }
        // dz is at most 1, or there are 2 columns, and d_hidden is rounded to the operands' format.
        double near = 1e-5;
        if (engine().shortens_gradients(c.problem)) {
          for (double v : c.weight) near = std::max(near, 3 * 0x1p-9 * std::abs(v));
        }
        // Probabilities are at least 2^-10 here.
        if (threshold <= 0x1p-10 && size.vocab <= 2) {
          for (size_t k = 0; k < truth.d_hidden.size(); ++k)
            EXPECT_NEAR(got.d_hidden[k], truth.d_hidden[k], near);
        }
      }
    }
  }
}

TEST_P(SparsifiedEdges, AllIgnored) {
  Case c = sparsified({30, 100, 5}, 0x1p-6);
  std::fill(c.targets.begin(), c.targets.end(), c.problem.ignore_index);
  for (const Outputs& got : all_ways(c)) {
    for (const auto* zero :
         {&got.d_hidden, &got.d_weight, &got.d_bias, &got.kept_count, &got.draw_variance}) {
      EXPECT_TRUE(all_are(0, *zero));
    }
  }
}

// Systematic draws from a uniform softmax keep 1 / threshold elements in all rows but for the ends of blocks.
TEST_P(SparsifiedEdges, Uniform) {
  Case c = sparsified(reduced({16, 20'000, 4}), engine().is_reference() ? 0x1p-5 : 0x1p-9);
  std::fill(c.bias.begin(), c.bias.end(), 0);
  std::fill(c.weight.begin(), c.weight.end(), 0);
  const double expected = 1 / c.problem.threshold;
  for (const Outputs& got : all_ways(c)) {
    const double kept = sum_of(got.kept_count) / 16;
    const double dense = is_device() ? 208 : 0;  // of 20,000 columns
    EXPECT_NEAR(kept, expected * (1 - dense / 20'000) + 1 + dense,
                5 * std::sqrt(expected / 16) + (dense > 0));
    // dz is the target's exact part, and draws of the same weight.
    EXPECT_NEAR(sum_of(got.d_bias), 0, 5 * std::sqrt(c.problem.threshold / 16));
  }
}

TEST_P(SparsifiedEdges, OneHot) {
  Case c = sparsified(reduced({9, 3000, 2}), 0x1p-8);
  std::fill(c.weight.begin(), c.weight.end(), 0);
  std::fill(c.bias.begin(), c.bias.end(), 0);
  c.bias[211] = 1000;
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  std::fill(c.targets.begin(), c.targets.end(), 3);
  c.targets[0] = 211;
  for (const Outputs& got : all_ways(c)) {
    for (size_t i = 0; i < 9; ++i) {
      const double kept = is_device() ? std::min(got.kept_count[i], 2.0) : got.kept_count[i];
      EXPECT_EQ(kept, i == 0 && !is_device() ? 1 : 2);
    }
    for (size_t j = 0; j < got.d_bias.size(); ++j) EXPECT_EQ(got.d_bias[j], j == 211 ? 8 : (j == 3 ? -8 : 0));
  }
}

// Returns a case whose first columns say nothing about the rest. All mass is in the last columns, far above
// the target and the columns before, so lists fill up many times over. `step` is the difference between
// neighboring columns' logits.
Case late_mass(Case c, double step) {
  std::fill(c.weight.begin(), c.weight.end(), 0);
  const size_t vocab = c.bias.size();
  for (size_t j = 0; j < vocab; ++j) {
    c.bias[j] = j < vocab / 3 ? -60 : rounded(step * static_cast<double>(j), as_dtype(c.problem.dtype.bias));
  }
  std::fill(c.targets.begin(), c.targets.end(), 1);
  return c;
}

TEST_P(SparsifiedEdges, AllMassInTheLastColumns) {
  for (double step : {0.0, 0.0005, 0.02}) {
    const Case c =
        late_mass(sparsified(reduced({8, 60'000, 3}), engine().is_reference() ? 0x1p-5 : 0x1p-8), step);
    for (const Outputs& got : all_ways(c)) expect_drawn(got, c, 624);  // dense columns of 60,000
  }
}

// When a full list is sparsified depends on the threads; its final elements do not.
TEST_P(SparsifiedEdges, FullListsDoNotDependOnThreadsSlow) {
  if (is_device()) GTEST_SKIP() << "runs on a device use no threads";
  const logitless::Context one = make_context(engine(), 1);
  for (double step : {0.0, 0.0005, 0.02}) {
    Case c = late_mass(sparsified(reduced({40, 60'000, 3}), engine().is_reference() ? 0x1p-5 : 0x1p-8), step);
    for (int32_t keeps : {0, 1}) {
      c.problem.has.saved = keeps;
      c.mode = keeps != 0 ? Mode::kForwardThenBackward : Mode::kForwardBackward;
      const Outputs expected = logitless_test::solve(one, c);
      for (int threads : {2, 5}) {
        EXPECT_STREQ(
            first_difference(logitless_test::solve(make_hosted_context(engine(), threads), c), expected), "");
      }
    }
  }
}

// Masked columns are never kept.
TEST_P(SparsifiedEdges, MaskedColumns) {
  Case c = sparsified(reduced({7, 2000, 3}), 0x1p-7);
  const size_t vocab = c.bias.size();
  for (size_t j = 0; j < vocab; ++j) {
    if (j % 3 != 0 || j < vocab / 2) c.bias[j] = -kInfinity;
  }
  for (int64_t& target : c.targets) target = static_cast<int64_t>((vocab - 1) / 3 * 3);
  for (const Outputs& got : all_ways(c)) {
    for (size_t j = 0; j < vocab; ++j) {
      EXPECT_TRUE(c.bias[j] != -kInfinity || got.d_bias[j] == 0) << j;
    }
    EXPECT_TRUE(all_finite(got.d_hidden));
  }
}

// A NaN or an infinite logit makes its row's gradient NaN, and the target's row of d_weight. Other rows'
// results that it has no part in stay as they are.
TEST_P(SparsifiedEdges, NotFinite) {
  for (double value : {kNaN, kInfinity}) {
    Case c = sparsified(reduced({6, 1500, 2}), 0x1p-6);
    c.hidden[2 * 2] = value;
    c.targets = {1, 2, 3, 4, 5, 6};
    for (const Outputs& got : all_ways(c)) {
      EXPECT_FALSE(std::isfinite(got.lse[2]));
      for (size_t k = 0; k < 2; ++k) EXPECT_TRUE(std::isnan(got.d_hidden[2 * 2 + k]));
      EXPECT_TRUE(std::isnan(got.d_bias[3]) || value == kInfinity);
      for (size_t i : {0, 1, 3, 4, 5}) EXPECT_TRUE(std::isfinite(got.d_hidden[i * 2])) << i;
    }
  }
}

TEST_P(SparsifiedEdges, SeedInMemory) {
  const Case c = sparsified(reduced({12, 900, 3}), 0x1p-6);
  logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
  problem.seed = 1234567890123;
  const Outputs expected = run_pass(context_, problem, c);
  problem.seed = 5;
  Case with_seed = c;
  with_seed.seed_in_memory = {1234567890123};
  EXPECT_STREQ(first_difference(run_pass(context_, problem, with_seed), expected), "");
}

// A refusal names the argument, what was expected and what came.
TEST_P(SparsifiedEdges, Refusals) {
  const Case c = sparsified({4, 9, 2}, 0x1p-6);
  const auto refused = [&](const auto& change) -> std::string {
    logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
    change(problem);
    const logitless::Error error = refusal([&] { logitless::Plan(context_, problem); });
    EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
    return error.what();
  };
  const auto expect = [&](const std::string& got, const std::vector<std::string>& words) {
    for (const std::string& word : words) EXPECT_NE(got.find(word), std::string::npos) << got;
  };
  for (double threshold : {0.0, -0.5, 1.5, kNaN}) {
    expect(refused([&](auto& p) { p.threshold = threshold; }), {"threshold: expected ", ", got"});
  }
  expect(refused([](auto& p) { p.has.saved = 1; }),
         {"saved: expected none in a plan whose pass is forward_backward", "got one"});
  expect(refused([](auto& p) { p.gradient = 3; }), {"gradient: expected", "got 3"});
  expect(refused([](auto& p) {
           p.label_smoothing = 0.25;
           p.softcap = 1;
         }),
         {"label_smoothing: expected 0 with sparsified gradients and a softcap", "got 0.25"});
}

// All logits are the same, of a size that no logarithm of a sum changes, and of either sign.
TEST_P(SparsifiedEdges, HugeEqualLogitsEnd) {
  const int64_t vocab = engine().is_reference() ? 600 : 4096;
  for (double value : {1e3, 1e5, 1e9, 0x1p62, -1e9, -0x1p62}) {
    // Logits of the reference are float64, and a saved lse does not have all digits of 1e9.
    if (engine().is_reference() && std::fabs(value) == 1e9) continue;
    Case c = sparsified({2, vocab, 8}, 0x1p-6);
    std::fill(c.hidden.begin(), c.hidden.end(), rounded(std::fabs(value), engine().plain_dtype()));
    std::fill(c.weight.begin(), c.weight.end(), rounded(value, engine().plain_dtype()));
    std::fill(c.bias.begin(), c.bias.end(), 0);
    c.targets = {1, vocab - 1};
    c.problem.reduction = LOGITLESS_REDUCTION_SUM;
    SCOPED_TRACE(value);
    for (const Outputs& got : all_ways(c)) expect_drawn(got, c, 8 + static_cast<double>(vocab) / 96);
  }
}

// A row's mass is in six columns far above all others, which hardly any lse estimate has seen. So sums leave
// their range, and most rows are drawn again. The mean over seeds is the gradient nevertheless.
TEST_P(SparsifiedEdges, BadEstimatesOfMostRows) {
  constexpr int64_t kGroups = 8, kPeaks = 6;
  const int64_t seed_count = is_emulated() ? 24 : 48;
  for (double height : {100.0, 9984.0}) {
    // One of both takes tensor cores on a device.
    const logitless_dtype dtype = is_device() && height == 100 ? LOGITLESS_BF16 : engine().plain_dtype();
    Case c = as_sparsified(plain_case(41, reduced({24, 4000, kGroups}), dtype), 0.5);
    c.problem.dtype.d_hidden = c.problem.dtype.d_weight = c.problem.dtype.d_bias = LOGITLESS_F32;
    const auto vocab = static_cast<size_t>(c.problem.vocab);
    std::fill(c.hidden.begin(), c.hidden.end(), 0);
    std::fill(c.weight.begin(), c.weight.end(), 0);
    std::fill(c.bias.begin(), c.bias.end(), 0);
    c.problem.reduction = LOGITLESS_REDUCTION_SUM;
    Random random(3);
    for (size_t i = 0; i < c.targets.size(); ++i) {
      c.hidden[i * kGroups + i % kGroups] = 1;
      c.targets[i] = static_cast<int64_t>(i % 3);
    }
    for (size_t peak = 0; peak < kGroups * kPeaks; ++peak) {
      // Far from the first columns, which are dense.
      const auto column = static_cast<size_t>(random.uniform(0.1, 1) * static_cast<double>(vocab));
      c.weight[column * kGroups + peak % kGroups] = height;
      c.bias[column] = static_cast<double>(peak % 3) / 2;
    }
    const Expected expected(c);
    const Bounds bounds = expected.bounds_of(engine());
    const std::vector<double>&d_bias = expected.truth().d_bias, &d_hidden = expected.truth().d_hidden;
    SCOPED_TRACE(testing::Message() << "height " << height);
    Sums of_bias, of_hidden;
    for (c.problem.seed = 0; c.problem.seed < seed_count; ++c.problem.seed) {
      c.problem.has.saved = c.problem.seed % 2;
      c.mode = c.problem.has.saved != 0 ? Mode::kForwardThenBackward : Mode::kForwardBackward;
      const Outputs got = solve(c);
      for (size_t i = 0; i < got.lse.size(); ++i) {
        ASSERT_NEAR(got.lse[i], expected.truth().lse[i], bounds.lse);
      }
      of_bias.add(got.d_bias);
      of_hidden.add(got.d_hidden);
    }
    const auto expect_mean = [&](const char* what, const Sums& sums, const std::vector<double>& truth,
                                 double bound) {
      for (size_t i = 0; i < truth.size(); ++i) {
        EXPECT_NEAR(sums.mean(i), truth[i], 5.5 * std::sqrt(sums.variance(i)) + bound)
            << what << "[" << i << "]";
      }
    };
    expect_mean("d_bias", of_bias, d_bias, bounds.d_bias);
    expect_mean("d_hidden", of_hidden, d_hidden, bounds.d_hidden);
  }
}

// Covers largest and smallest finite logits, one of them far from all others, infinities and NaN: no end of
// any loop depends on them.
TEST_P(SparsifiedEdges, AnyLogitsEnd) {
  constexpr double kMost = 3e38;
  constexpr std::array<size_t, 3> kPlaces{0, 700, 1499};
  size_t turn = 0;
  for (double common : {kMost, -kMost, 1e30, -1e31, 0.0, kNaN}) {
    for (double odd : {kMost, -kMost, 1e20, kNaN, kInfinity, -kInfinity}) {
      Case c = sparsified({2, 1500, 2}, 0x1p-5);
      c.problem.dtype.bias = LOGITLESS_F32;
      std::fill(c.weight.begin(), c.weight.end(), 0);
      std::fill(c.bias.begin(), c.bias.end(), rounded(common, LOGITLESS_F32));
      c.targets = {1, 700};
      if (++turn % 7 % 4 != 0 && is_emulated()) continue;  // 10 of 36, with each logit and place
      for (size_t k = 0; k < (is_emulated() ? 1 : kPlaces.size()); ++k) {
        const size_t at = kPlaces[(turn + turn / 6 + k) % kPlaces.size()];
        Case one = c;
        one.bias[at] = std::isfinite(odd) ? rounded(odd, LOGITLESS_F32) : odd;
        for (const Outputs& got : all_ways(one)) {
          if (!std::isfinite(common) || std::isnan(odd) || odd == INFINITY) continue;
          SCOPED_TRACE(testing::Message() << common << ", one of " << odd << " at " << at);
          EXPECT_NEAR(sum_of(got.d_bias), 0, 6 * std::sqrt(c.problem.threshold / 2));
        }
      }
    }
  }
}

// Nothing is below such thresholds: the gradient is exact, however many 1 / threshold are.
TEST_P(SparsifiedEdges, TinyThresholdsKeepAll) {
  for (int64_t vocab : {10, 20, 449}) {
    for (double threshold : {1e-12, 1e-30, 0x1p-126}) {
      const Case c = sparsified({5, vocab, 3}, threshold);
      const Expected expected(c);
      const Bounds bounds = expected.bounds_of(engine());
      SCOPED_TRACE(testing::Message() << "threshold " << threshold << ", " << describe(c));
      for (const Outputs& got : all_ways(c)) {
        expect_gradients(got, expected.truth(), bounds);
      }
    }
  }
}

// Weights are float32: thresholds below its normal numbers are refused, and the message says so.
TEST_P(SparsifiedEdges, ThresholdsThatFloat32HasNot) {
  for (double threshold : {0x1.fp-127, 1e-40, 0x1p-150, 1e-46, 5e-324}) {
    const Case c = sparsified({4, 20, 2}, threshold);
    for (logitless::Pass pass : {logitless::Pass::forward_backward, logitless::Pass::backward}) {
      const logitless::Error error = refusal([&] { logitless::Plan(context_, pass_problem(c, pass)); });
      EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
      EXPECT_EQ(error.argument, "threshold");
      EXPECT_EQ(error.expected, "a number in [1.17549435e-38, 1]");
      EXPECT_FALSE(error.got.empty() || error.got.starts_with('0')) << error.got;
    }
  }
}

LOGITLESS_TEST_ON(SparsifiedEdges, engines());

}  // namespace
}  // namespace logitless_test
