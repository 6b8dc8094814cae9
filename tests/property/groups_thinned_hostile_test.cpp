// Thinned gradients in groups of ranks on a device where a rank has little, or all ranks know little before
// the draw: shards without a finite logit, guesses of lse that are far too high, and shards that are a little
// smaller than others.
#include "groups_fixture.h"

namespace logitless_test {
namespace {

class HostileThinnedGroups : public ThinnedDeviceGroupsTest {
 protected:
  // Columns before `first` and from `end` on are masked by a bias of -inf.
  Case masked(PlainSize size, double threshold, int64_t first, int64_t end) const {
    Case c = thinned(plain(7, size), threshold);
    c.problem.has.bias = 1;
    c.bias.assign(static_cast<size_t>(size.vocab), -INFINITY);
    std::fill(c.bias.begin() + first, c.bias.begin() + end, 0.0);
    return c;
  }

  // One device finds a bad guess by the sum of all columns.
  void expect_lse_of_one_device(const Case& c, const Sizes& sizes, double allowed) const {
    const Outputs one = solve(c), got = solve_in_group(c, sizes);
    for (size_t i = 0; i < one.lse.size(); ++i) EXPECT_NEAR(got.lse[i], one.lse[i], allowed) << "row " << i;
    EXPECT_NEAR(got.loss[0], one.loss[0], allowed);
  }
};

// Rows of the block of a NaN are summed once more, also where a rank has nothing to add up.
TEST_P(HostileThinnedGroups, NaNBesideAMaskedShard) {
  Case c = masked({30, 400, 8}, kKeepsAll, 0, 250);
  for (size_t i = 0; i < c.targets.size(); ++i) c.targets[i] = static_cast<int64_t>(i * 5 % 250);
  const Sizes sizes{250, 150};
  const Outputs clean = solve_in_group(c, sizes);
  const Bounds bounds = bounds_of(c, sizes);
  constexpr size_t kBadRow = 17;
  c.hidden[kBadRow * 8 + 3] = NAN;
  const Outputs got = solve_in_group(c, sizes);
  for (size_t i = 0; i < got.lse.size(); ++i) {
    if (i == kBadRow) {
      EXPECT_TRUE(std::isnan(got.lse[i]));
    } else {
      EXPECT_NEAR(got.lse[i], clean.lse[i], bounds.lse) << "row " << i;
    }
  }
}

// All that is seen before the draw is masked, the targets too.
TEST_P(HostileThinnedGroups, GuessOfNothing) {
  Case c = masked({30, 2000, 8}, 1.0 / 16, 900, 902);
  for (size_t i = 0; i < c.targets.size(); ++i) c.targets[i] = static_cast<int64_t>(i % 3);
  const Sizes sizes{1500, 500};
  Case unmasked = c;  // whose lse is the same
  unmasked.problem.vocab = 2;
  unmasked.classifier.assign(c.classifier.begin() + 900 * 8, c.classifier.begin() + 902 * 8);
  unmasked.bias.assign(2, 0.0);
  std::ranges::fill(unmasked.targets, 0);
  const Outputs got = solve_in_group(c, sizes);
  const Expected expected(unmasked);
  const double allowed = bounds_of(unmasked, sizes).lse;
  for (size_t i = 0; i < got.lse.size(); ++i) {
    EXPECT_NEAR(got.lse[i], expected.truth().lse[i], allowed) << "row " << i;
  }
}

TEST_P(HostileThinnedGroups, NothingButMaskedColumns) {
  const Outputs got = solve_in_group(masked({30, 400, 8}, kKeepsAll, 0, 0), {250, 150});
  for (const double lse : got.lse) EXPECT_FALSE(std::isfinite(lse));
  EXPECT_FALSE(std::isfinite(got.loss[0]));
}

// Targets' logits of fp32 operands that are not rounded would be so much above those of the products; also
// where a column of the other rank has most of a row.
TEST_P(HostileThinnedGroups, RoundedTargets) {
  constexpr int64_t kTokens = 40, kVocab = 3000, kDepth = 8;
  Case c = thinned(plain_case(7, {kTokens, kVocab, kDepth}, LOGITLESS_F32), 1.0 / 16);
  c.problem.compute_dtype = LOGITLESS_BF16;
  if (!engine().can_thin(c.problem)) GTEST_SKIP() << "operands are not rounded";
  remove_bias(&c);
  const double value = static_cast<float>(1.00375);  // becomes 1
  std::ranges::fill(c.hidden, value);
  for (const bool has_other : {false, true}) {
    std::ranges::fill(c.classifier, 0.0);
    for (int64_t i = 0; i < kTokens; ++i) {
      const int64_t target = c.targets[static_cast<size_t>(i)] = 2 + 30 * i;  // of rank 0
      std::fill_n(c.classifier.begin() + target * kDepth, kDepth, value);
    }
    if (has_other) {
      std::fill_n(c.classifier.begin() + 2990 * kDepth, kDepth, 1.0);
      c.classifier[2990 * kDepth] = 1 + 0x1p-7;
    }
    for (const double nats : {40.0, 95.0, 150.0}) {
      SCOPED_TRACE(testing::Message() << nats << ", a larger one " << has_other);
      c.problem.scale = nats / (kDepth * (value * value - 1));
      expect_lse_of_one_device(c, {1400, 1600}, 0.01);
    }
  }
}

// As are logits of large products that cancel, if they are added up in another order.
TEST_P(HostileThinnedGroups, TargetsThatCancel) {
  constexpr int64_t kTokens = 40, kVocab = 3000, kDepth = 16;
  Case c = thinned(plain(7, {kTokens, kVocab, kDepth}), 1.0 / 16);
  remove_bias(&c);
  std::ranges::fill(c.hidden, 1.0);
  std::ranges::fill(c.classifier, 0.0);
  for (size_t j = 0; j < c.classifier.size(); j += kDepth) {
    c.classifier[j] = 0x1p33;
    c.classifier[j + 8] = -0x1p33;
    c.classifier[j + 9] = -150;
  }
  for (int64_t i = 0; i < kTokens; ++i) c.targets[static_cast<size_t>(i)] = 2 + 30 * i;
  expect_lse_of_one_device(c, {1400, 1600}, 0.01);
}

// Of 1535 columns fewer are dense than of 1536, so that more are left for the lists.
TEST_P(HostileThinnedGroups, DrawsOfSmallerShards) {
  Case c = thinned(plain(41, {40, 1536 + 1535, 8}), 1.0 / 1024);
  c.mode = Mode::kForwardThenBackward;
  c.problem.has.draws = 1;
  const Sizes sizes{1536, 1535};
  const Expected expected(c);
  EXPECT_NEAR(solve_in_group(c, sizes).loss[0], expected.truth().loss[0], bounds_of(c, sizes).loss);
}

// No shard needs more memory than the largest, or plans otherwise.
TEST_P(HostileThinnedGroups, PlansOfAnyShard) {
  Random random(5);
  for (uint64_t n = 0; n < seeds(6000); ++n) {
    Case c = thinned(plain(1, {1, 8, 8}), std::exp2(-static_cast<double>(random.integer(6, 12))));
    c.problem.has.bias = random.chance(0.5);
    c.problem.has.d_bias = c.problem.has.bias && random.chance(0.5);
    c.problem.has.d_classifier = random.chance(0.5);
    const auto pass =
        random.pick({logitless::Pass::forward_backward, logitless::Pass::forward, logitless::Pass::backward});
    c.problem.has.draws = pass != logitless::Pass::forward_backward;
    logitless::Problem p = pass_problem(c, pass);
    p.tokens = random.chance(0.5) ? random.integer(1, 400) : random.integer(900, 6000);
    p.hidden = random.chance(0.5) ? 8 * random.integer(1, 16) : random.integer(1, 600);
    if (random.chance(0.25)) p.gradient = LOGITLESS_THINNED;
    // Around the multiples at which another 8 columns are dense, or hot.
    const int64_t step = random.pick<int64_t>({1, 96 * 8, 160 * 8});
    const int64_t largest =
        step == 1 ? random.integer(1, 1500) : step * random.integer(1, 8) + random.integer(0, 2);
    p.vocab = largest;
    logitless::set_group(p, static_cast<int32_t>(random.integer(2, 8)), 0, 2 * largest, largest);
    const logitless::PlanInfo of_largest = logitless::Plan(context_, p).info();
    for (const int64_t vocab :
         {std::max<int64_t>(largest - random.integer(1, 3), 0), random.integer(0, largest)}) {
      p.vocab = vocab;
      SCOPED_TRACE(testing::Message()
                   << p.tokens << " x " << vocab << " of " << largest << " x " << p.hidden << ", threshold "
                   << p.threshold << ", pass " << p.pass << ", gradient " << p.gradient);
      logitless::PlanInfo plan;
      ASSERT_NO_THROW(plan = logitless::Plan(context_, p).info());
      EXPECT_EQ(plan.kind, of_largest.kind);
      EXPECT_EQ(plan.workspace_bytes, of_largest.workspace_bytes);
      EXPECT_EQ(plan.draws_bytes, of_largest.draws_bytes);
    }
  }
}

LOGITLESS_TEST_ON(HostileThinnedGroups, device_engines());

}  // namespace
}  // namespace logitless_test
