// Thinned gradients in groups of ranks on a device. Which elements a seed keeps depends on the cut of the
// vocabulary there, so what is tested is what does not: the loss, gradients that keep everything, repeatable
// bits, and means over seeds.
#include "groups_fixture.h"

namespace logitless_test {
namespace {

class ThinnedDeviceGroups : public ThinnedDeviceGroupsTest {
 protected:
  void expect_all_kept(const Case& c, const Sizes& sizes) const {
    SCOPED_TRACE(testing::Message() << describe(c) << "\ncut into " << testing::PrintToString(sizes));
    Expected(c).check(solve_in_group(c, sizes), bounds_of(c, sizes));
  }
};

TEST_P(ThinnedDeviceGroups, KeepingAllIsTheExactGradient) {
  Case c = thinned(plain(41, {40, 700, 24}), kKeepsAll);
  for (size_t i = 0; i < c.hidden.size() / 2; ++i) c.hidden[i] *= 2;  // some rows more peaked than others
  c.targets[5] = c.problem.ignore_index;
  for (const double smoothing : {0.0, 0.25}) {
    c.problem.label_smoothing = smoothing;
    for (const Sizes& sizes : {Sizes{350, 350}, Sizes{17, 0, 683}, Sizes{0, 700}, Sizes{49, 300, 1, 350}}) {
      for (const bool keeps : {false, true}) {
        for (const Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
          if (keeps && mode == Mode::kForwardBackward) continue;
          c.mode = mode;
          c.problem.has.draws = keeps;
          expect_all_kept(c, sizes);
        }
      }
    }
  }
}

TEST_P(ThinnedDeviceGroups, RandomProblems) {
  uint64_t done = 0;
  for (uint64_t seed = 0; done < seeds(30); ++seed) {
    Case c = thinned(random_case(seed, {.largest_dimension = 300, .allow_fp64 = false}), kKeepsAll);
    if (c.mode == Mode::kForward || !engine().can_thin(c.problem)) continue;
    ++done;
    Random random(seed);
    const int64_t first = random.integer(0, c.problem.vocab),
                  second = random.integer(0, c.problem.vocab - first);
    expect_all_kept(c, {first, second, c.problem.vocab - first - second});
  }
}

// One rank has nearly all of a row's mass, and others so little that their sums vanish beside it, or nothing:
// entries masked by a bias of -inf, without which the problem has the same answer.
TEST_P(ThinnedDeviceGroups, RowsWhoseMassIsOfOneRank) {
  constexpr int64_t kLikely = 150, kUnmasked = 250, kDepth = 8;
  Case masked = thinned(plain(7, {30, 400, kDepth}), kKeepsAll);
  masked.problem.has.bias = 1;
  masked.bias.assign(400, -INFINITY);
  for (int64_t j = 0; j < kUnmasked; ++j) masked.bias[static_cast<size_t>(j)] = j < kLikely ? 0 : -300;
  for (size_t i = 0; i < masked.targets.size(); ++i)
    masked.targets[i] = static_cast<int64_t>(i * 5 % kLikely);
  Case c = masked;
  c.problem.vocab = kUnmasked;
  c.classifier.resize(kUnmasked * kDepth);
  c.bias.resize(kUnmasked);
  for (const Sizes& sizes : {Sizes{150, 100, 150}, Sizes{250, 150}, Sizes{149, 251}, Sizes{140, 60, 200}}) {
    Outputs got = solve_in_group(masked, sizes);
    for (size_t k = kUnmasked * kDepth; k < got.d_classifier.size(); ++k) ASSERT_EQ(got.d_classifier[k], 0);
    for (size_t j = kUnmasked; j < got.d_bias.size(); ++j) ASSERT_EQ(got.d_bias[j], 0);
    got.d_classifier.resize(c.classifier.size());
    got.d_bias.resize(c.bias.size());
    SCOPED_TRACE(testing::Message() << describe(c) << "\ncut into " << testing::PrintToString(sizes));
    Expected(c).check(got, bounds_of(c, sizes));
  }
}

// Of one row they stay in its row, on all ranks; in the classifier, of whichever rank, all rows have them.
TEST_P(ThinnedDeviceGroups, NaNAndInfinity) {
  const Case c = thinned(plain(10, {37, 300, 11}), kKeepsAll);
  const Sizes sizes{140, 0, 160};
  const Expected expected(c);
  const Bounds bounds = bounds_of(c, sizes);
  constexpr size_t kBadRow = 17, kHidden = 11;
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Case of_row = c;
    of_row.hidden[kBadRow * kHidden + 3] = bad;
    const Outputs got = solve_in_group(of_row, sizes);
    for (size_t i = 0; i < got.lse.size(); ++i) {
      if (i == kBadRow) continue;
      EXPECT_NEAR(got.lse[i], expected.truth().lse[i], bounds.lse) << "row " << i;
      for (size_t k = i * kHidden; k < (i + 1) * kHidden; ++k) {
        EXPECT_NEAR(got.d_hidden[k], expected.truth().d_hidden[k], bounds.d_hidden) << "row " << i;
      }
    }
    EXPECT_FALSE(std::isfinite(got.lse[kBadRow]));
    EXPECT_FALSE(std::isfinite(got.d_hidden[kBadRow * kHidden]));
  }
  for (const size_t column : {size_t{3}, size_t{299}}) {
    Case of_column = c;
    of_column.classifier[column * kHidden + 1] = NAN;
    const Outputs got = solve_in_group(of_column, sizes);
    EXPECT_TRUE(std::isnan(got.loss[0]));
    for (const double d : got.d_hidden) EXPECT_TRUE(std::isnan(d));
  }
}

TEST_P(ThinnedDeviceGroups, TheLossIsTheExactOne) {
  Case c = thinned(plain(13, {50, 3000, 24}), 1.0 / 64);
  for (const double scale : {0.01, 1.0, 40.0}) {
    c.problem.scale = scale;
    const Sizes sizes{1400, 100, 1500};
    const Outputs got = solve_in_group(c, sizes);
    const Expected expected(c);
    const Bounds bounds = bounds_of(c, sizes);
    EXPECT_NEAR(got.loss[0], expected.truth().loss[0], bounds.loss) << scale;
    for (size_t i = 0; i < got.lse.size(); ++i) {
      EXPECT_NEAR(got.lse[i], expected.truth().lse[i], bounds.lse) << scale << ", row " << i;
    }
  }
}

TEST_P(ThinnedDeviceGroups, TheSameSeedGivesTheSameBits) {
  Case c = thinned(plain(17, {70, 2000, 24}), 1.0 / 64);
  c.problem.seed = 3;
  const Outputs first = solve_in_group(c, {900, 1100});
  EXPECT_STREQ(first_difference(first, solve_in_group(c, {900, 1100})), "");
  c.problem.seed = 4;
  EXPECT_STRNE(first_difference(first, solve_in_group(c, {900, 1100})), "");
}

TEST_P(ThinnedDeviceGroups, TheMeanOverSeedsIsTheGradientSlow) {
  Case c = thinned(plain(3, {6, 500, 5}), 1.0 / 16);
  expect_unbiased(c, {240, 260}, 150, Expected(c).bounds_of(engine()).d_hidden);
  // Of which one rank's guess is far above what its columns have.
  for (double& value : c.hidden) value *= 2;
  expect_unbiased(c, {30, 470}, 150, Expected(c).bounds_of(engine()).d_hidden);
}

// A draw with a guess tells of it, and one with known sums of nothing more than the exact plan does.
TEST_P(ThinnedDeviceGroups, PlansCountWhatIsExchanged) {
  const Case c = thinned(plain(5, {64, 300, 8}), 0.25);
  logitless::Problem p = pass_problem(c, logitless::Pass::forward_backward);
  p.vocab = 100;
  logitless::set_group(p, 3, 0, 300, 100);
  const logitless::Plan plan(context_, p);
  EXPECT_EQ(plan.info().kind, LOGITLESS_PLAN_THINNED);
  const int64_t with_guess = engine().is_fused();
  EXPECT_EQ(plan.info().gathers, 1 + with_guess);
  EXPECT_EQ(plan.info().gathered_bytes, static_cast<uint64_t>(3 * 4 * (64 * (3 + with_guess) + 4)));
}

// And a run makes as many exchanges, beside the sum of d_hidden: none of one rank, or without tokens.
TEST_P(ThinnedDeviceGroups, RunsExchangeWhatPlansCount) {
  for (const int64_t tokens : {64, 0}) {
    const Case c = thinned(plain(5, {tokens, 300, 8}), 0.25);
    for (const Sizes& sizes : {Sizes{100, 0, 200}, Sizes{300}}) {
      for (const auto pass : {logitless::Pass::forward, logitless::Pass::forward_backward}) {
        logitless::Problem p = pass_problem(c, pass);
        p.vocab = sizes[0];
        logitless::set_group(p, static_cast<int32_t>(sizes.size()), 0, 300, std::ranges::max(sizes));
        run_ranks(c, pass, sizes);
        const bool sums = p.has.d_hidden != 0 && sizes.size() > 1 && tokens > 0;
        EXPECT_EQ(calls_, logitless::Plan(context_, p).info().gathers + sums)
            << tokens << " tokens, " << sizes.size() << " ranks, pass " << p.pass;
      }
    }
  }
}

LOGITLESS_TEST_ON(ThinnedDeviceGroups, device_engines());

}  // namespace
}  // namespace logitless_test
