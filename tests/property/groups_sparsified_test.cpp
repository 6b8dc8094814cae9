// Sparsified gradients in groups of ranks.
// On the host the same seed keeps the same elements for any cut of the vocabulary, and the float64 reference
// keeps them as well. On a device the elements that a seed keeps depend on the cut. So the tests cover the
// rest: the loss, gradients that keep everything, repeatable bits, and means over seeds. They include ranks
// that have little, and ranks that all know little before the draw.
#include "groups_fixture.h"
#include "sparsified_fixture.h"

namespace logitless_test {
namespace {

class AnySparsifiedGroups : public GroupTest {
 protected:
  static Case sparsified(Case c, double threshold) {
    c = as_sparsified(c, threshold);
    logitless::Problem& p = c.problem;
    p.top_k = 0;
    p.accumulate = {};
    for (auto* start : {&c.d_hidden_start, &c.d_weight_start, &c.d_bias_start}) start->clear();
    c.d_hidden_layout = {};
    if (p.dtype.hidden != LOGITLESS_F64) {
      p.dtype.d_hidden = p.dtype.d_weight = p.dtype.d_bias = LOGITLESS_F32;
    }
    return c;
  }

  // Some rows are more peaked than others, and one is ignored.
  Case uneven(PlainSize size, double threshold) const {
    Case c = sparsified(plain(41, size), threshold);
    for (size_t i = 0; i < c.hidden.size() / 2; ++i) c.hidden[i] *= 2;
    c.targets[5] = c.problem.ignore_index;
    return c;
  }

  static testing::Message place(const Case& c, const Sizes& sizes) {
    return testing::Message() << describe(c) << "\ncut into " << testing::PrintToString(sizes);
  }

  // Runs each cut in one pass, and in two whose draws are kept or made again.
  template <class Use>
  static void for_each_way(Case c, const std::vector<Sizes>& cuts, const Use& use) {
    for (const Sizes& sizes : cuts) {
      for (const bool keeps : {false, true}) {
        for (const Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
          if (keeps && mode == Mode::kForwardBackward) continue;
          c.mode = mode;
          c.problem.has.saved = keeps;
          use(c, sizes);
        }
      }
    }
  }

  // Random problems in three random parts.
  template <class Use>
  void for_random_problems(uint64_t count, CaseLimits limits, double threshold, const Use& use) const {
    for (const Case& c : random_cases(0, count, limits, [&](Case* each) {
           *each = sparsified(*each, threshold);
           return each->mode != Mode::kForward && engine().can_sparsify(each->problem);
         })) {
      Random random(c.seed);
      const int64_t first = random.integer(0, c.problem.vocab),
                    second = random.integer(0, c.problem.vocab - first);
      use(c, Sizes{first, second, c.problem.vocab - first - second});
    }
  }

  // Expects the mean over seeds within 5 of its own standard deviations.
  void expect_unbiased(Case c, const Sizes& sizes, int seed_count, double rounding) const {
    const std::vector<double> truth = Expected(c).truth().d_hidden;
    Sums sums;
    for (c.problem.seed = 0; c.problem.seed < seed_count; ++c.problem.seed) {
      sums.add(solve_in_group(c, sizes).d_hidden);
    }
    for (size_t i = 0; i < truth.size(); ++i) {
      EXPECT_NEAR(sums.mean(i), truth[i], 5 * std::sqrt(sums.variance(i)) + rounding)
          << "d_hidden[" << i << "]";
    }
  }
};

class SparsifiedGroups : public AnySparsifiedGroups {
 protected:
  // Expects both runs to keep one set of elements. Each run is off by its own rounding, and each rank's part
  // of d_hidden is rounded.
  void expect_same_elements(const Case& c, const Sizes& sizes, const Outputs& reference,
                            const Bounds& of_one) const {
    SCOPED_TRACE(place(c, sizes));
    Bounds bounds = static_cast<double>(sizes.size() + 2) * of_one;
    bounds.lse += static_cast<double>(sizes.size()) * 0x1p-24;
    expect_same_results(c, reference, solve_in_group(c, sizes), bounds);
  }
  Outputs of_reference(const Case& c) const { return logitless_test::solve(reference_, c); }

  logitless::Context reference_ = make_context({"reference", ""}, 2);
};

TEST_P(SparsifiedGroups, TheSameElementsForAnyCutSlow) {
  Case c = uneven({60, 3000, 24}, 1.0 / 64);
  for (const double smoothing : {0.0, 0.25}) {
    c.problem.label_smoothing = smoothing;
    const Bounds bounds = bounds_of(c);
    for (const int64_t seed : {7, 8}) {
      c.problem.seed = seed;
      const Outputs reference = of_reference(c);
      for_each_way(
          c, {{3000}, {1500, 1500}, {17, 0, 2983}, {449, 1000, 1, 1550}},
          [&](const Case& way, const Sizes& sizes) { expect_same_elements(way, sizes, reference, bounds); });
      Case other = c;
      other.problem.seed = seed + 100;  // other elements are further away than that
      EXPECT_FALSE(close("d_hidden", of_reference(other).d_hidden, reference.d_hidden, 4 * bounds.d_hidden,
                         LOGITLESS_F32));
    }
  }
}

TEST_P(SparsifiedGroups, RandomProblems) {
  for_random_problems(seeds(60), {.largest_dimension = 400}, 1.0 / 32,
                      [&](const Case& c, const Sizes& sizes) {
                        expect_same_elements(c, sizes, of_reference(c), bounds_of(c));
                      });
}

TEST_P(SparsifiedGroups, TheMeanOverSeedsIsTheGradientSlow) {
  expect_unbiased(sparsified(plain(3, {6, 90, 5}), 0.25), {40, 50}, is_slowed_down() ? 150 : 1000, 1e-6);
}

// Lists that fill up early are sparsified by a rank's own part of lse, which is less than all ranks have.
TEST_P(SparsifiedGroups, FlatRowsOfManyColumns) {
  Case c = sparsified(plain(5, {20, 9000, 8}), 1.0 / 16);
  for (double& value : c.hidden) value /= 64;
  for (const Sizes& sizes : {Sizes{4500, 4500}, Sizes{100, 8900}}) {
    expect_same_elements(c, sizes, of_reference(c), bounds_of(c));
  }
}

LOGITLESS_TEST_ON(SparsifiedGroups, host_engines());

class SparsifiedDeviceGroups : public AnySparsifiedGroups {
 protected:
  void SetUp() override {
    const std::string why = why_not_sparsified(engine());
    if (!why.empty()) GTEST_SKIP() << why;
  }

  // Each run is off by its own rounding, each rank's part of d_hidden is rounded, and so are the sums that
  // ranks exchange.
  Bounds bounds_of(const Case& c, const Sizes& sizes) const {
    Bounds bounds = static_cast<double>(sizes.size() + 1) * Expected(c).bounds_of(engine());
    bounds.lse += static_cast<double>(sizes.size()) * 0x1p-23;
    return bounds;
  }

  void expect_all_kept(const Case& c, const Sizes& sizes) const {
    expect_all_kept(c, sizes, solve_in_group(c, sizes));
  }
  void expect_all_kept(const Case& c, const Sizes& sizes, const Outputs& got) const {
    SCOPED_TRACE(place(c, sizes));
    Expected(c).check(got, bounds_of(c, sizes));
  }

  // Compares all rows but one.
  static void expect_lse(const std::vector<double>& got, const std::vector<double>& expected, double allowed,
                         size_t but_of = SIZE_MAX) {
    for (size_t i = 0; i < got.size(); ++i) {
      if (i != but_of) {
        EXPECT_NEAR(got[i], expected[i], allowed) << "row " << i;
      }
    }
  }

  // One device finds a bad lse estimate by the sum of all columns.
  void expect_lse_of_one_device(const Case& c, const Sizes& sizes, double allowed) const {
    const Outputs one = solve(c), got = solve_in_group(c, sizes);
    expect_lse(got.lse, one.lse, allowed);
    EXPECT_NEAR(got.loss[0], one.loss[0], allowed);
  }

  // Masks columns before `first` and from `end` on by a bias of -inf.
  Case masked(PlainSize size, double threshold, int64_t first, int64_t end) const {
    Case c = sparsified(plain(7, size), threshold);
    c.bias.assign(static_cast<size_t>(size.vocab), -INFINITY);
    std::fill(c.bias.begin() + first, c.bias.begin() + end, 0.0);
    return c;
  }
};

TEST_P(SparsifiedDeviceGroups, KeepingAllIsTheExactGradient) {
  Case c = uneven({40, 700, 24}, kKeepsAll);
  for (const double smoothing : {0.0, 0.25}) {
    c.problem.label_smoothing = smoothing;
    for_each_way(c, {{350, 350}, {17, 0, 683}, {0, 700}, {49, 300, 1, 350}},
                 [&](const Case& way, const Sizes& sizes) { expect_all_kept(way, sizes); });
  }
}

TEST_P(SparsifiedDeviceGroups, RandomProblems) {
  for_random_problems(seeds(30), {.allow_fp64 = false}, kKeepsAll,
                      [&](const Case& c, const Sizes& sizes) { expect_all_kept(c, sizes); });
}

// One rank has nearly all of a row's mass. Others have so little that their sums vanish beside it, or
// nothing: entries masked by a bias of -inf, without which the problem has the same answer.
TEST_P(SparsifiedDeviceGroups, RowsWhoseMassIsOfOneRank) {
  constexpr int64_t kLikely = 150, kUnmasked = 250, kDepth = 8;
  Case all = masked({30, 400, kDepth}, kKeepsAll, 0, kLikely);
  std::fill(all.bias.begin() + kLikely, all.bias.begin() + kUnmasked, -300);
  for (size_t i = 0; i < all.targets.size(); ++i) all.targets[i] = static_cast<int64_t>(i * 5 % kLikely);
  Case c = all;
  c.problem.vocab = kUnmasked;
  c.weight.resize(kUnmasked * kDepth);
  c.bias.resize(kUnmasked);
  for (const Sizes& sizes : {Sizes{150, 100, 150}, Sizes{250, 150}, Sizes{149, 251}, Sizes{140, 60, 200}}) {
    Outputs got = solve_in_group(all, sizes);
    for (size_t k = kUnmasked * kDepth; k < got.d_weight.size(); ++k) ASSERT_EQ(got.d_weight[k], 0);
    for (size_t j = kUnmasked; j < got.d_bias.size(); ++j) ASSERT_EQ(got.d_bias[j], 0);
    got.d_weight.resize(c.weight.size());
    got.d_bias.resize(c.bias.size());
    expect_all_kept(c, sizes, got);
  }
}

// A NaN or infinity of one row stays in its row, on all ranks. One in the weight, on whichever rank, reaches
// all rows.
TEST_P(SparsifiedDeviceGroups, NaNAndInfinity) {
  const Case c = sparsified(plain(10, {37, 300, 11}), kKeepsAll);
  const Sizes sizes{140, 0, 160};
  const Expected expected(c);
  const Bounds bounds = bounds_of(c, sizes);
  constexpr size_t kBadRow = 17, kHidden = 11;
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Case of_row = c;
    of_row.hidden[kBadRow * kHidden + 3] = bad;
    const Outputs got = solve_in_group(of_row, sizes);
    expect_lse(got.lse, expected.truth().lse, bounds.lse, kBadRow);
    for (size_t k = 0; k < got.d_hidden.size(); ++k) {
      if (k / kHidden == kBadRow) continue;
      EXPECT_NEAR(got.d_hidden[k], expected.truth().d_hidden[k], bounds.d_hidden) << "row " << k / kHidden;
    }
    EXPECT_FALSE(std::isfinite(got.lse[kBadRow]));
    EXPECT_FALSE(std::isfinite(got.d_hidden[kBadRow * kHidden]));
  }
  for (const size_t column : {size_t{3}, size_t{299}}) {
    Case of_column = c;
    of_column.weight[column * kHidden + 1] = NAN;
    const Outputs got = solve_in_group(of_column, sizes);
    EXPECT_TRUE(std::isnan(got.loss[0]));
    EXPECT_TRUE(all_are(NAN, got.d_hidden));
  }
}

// Rows of the block of a NaN are summed once more, even where a rank has nothing to add up.
TEST_P(SparsifiedDeviceGroups, NaNBesideAMaskedShard) {
  Case c = masked({30, 400, 8}, kKeepsAll, 0, 250);
  for (size_t i = 0; i < c.targets.size(); ++i) c.targets[i] = static_cast<int64_t>(i * 5 % 250);
  const Sizes sizes{250, 150};
  const Outputs clean = solve_in_group(c, sizes);
  const Bounds bounds = bounds_of(c, sizes);
  constexpr size_t kBadRow = 17;
  c.hidden[kBadRow * 8 + 3] = NAN;
  const Outputs got = solve_in_group(c, sizes);
  EXPECT_TRUE(std::isnan(got.lse[kBadRow]));
  expect_lse(got.lse, clean.lse, bounds.lse, kBadRow);
}

TEST_P(SparsifiedDeviceGroups, TheLossIsTheExactOne) {
  Case c = sparsified(plain(13, {50, 3000, 24}), 1.0 / 64);
  for (const double scale : {0.01, 1.0, 40.0}) {
    c.problem.scale = scale;
    SCOPED_TRACE(scale);
    const Sizes sizes{1400, 100, 1500};
    const Outputs got = solve_in_group(c, sizes);
    const Expected expected(c);
    const Bounds bounds = bounds_of(c, sizes);
    EXPECT_NEAR(got.loss[0], expected.truth().loss[0], bounds.loss);
    expect_lse(got.lse, expected.truth().lse, bounds.lse);
  }
}

TEST_P(SparsifiedDeviceGroups, TheSameSeedGivesTheSameBits) {
  Case c = sparsified(plain(17, {70, 2000, 24}), 1.0 / 64);
  c.problem.seed = 3;
  const Outputs first = solve_in_group(c, {900, 1100});
  EXPECT_STREQ(first_difference(first, solve_in_group(c, {900, 1100})), "");
  c.problem.seed = 4;
  EXPECT_STRNE(first_difference(first, solve_in_group(c, {900, 1100})), "");
}

TEST_P(SparsifiedDeviceGroups, TheMeanOverSeedsIsTheGradientSlow) {
  Case c = sparsified(plain(3, {6, 500, 5}), 1.0 / 16);
  expect_unbiased(c, {240, 260}, 150, Expected(c).bounds_of(engine()).d_hidden);
  // One rank's lse estimate is far above what its columns have.
  for (double& value : c.hidden) value *= 2;
  expect_unbiased(c, {30, 470}, 150, Expected(c).bounds_of(engine()).d_hidden);
}

// Ranks exchange their lse estimates, beside the sums that an exact plan exchanges.
TEST_P(SparsifiedDeviceGroups, PlansCountWhatIsExchanged) {
  const Case c = sparsified(plain(5, {64, 300, 8}), 0.25);
  logitless::Problem p = pass_problem(c, logitless::Pass::forward_backward);
  p.vocab = 100;
  logitless::set_group(p, 3, 0, 300, 100);
  const logitless::Plan plan(context_, p);
  EXPECT_EQ(plan.info().kind, LOGITLESS_PLAN_SPARSIFIED);
  EXPECT_EQ(plan.info().gathers, 2);
  EXPECT_EQ(plan.info().gathered_bytes, static_cast<uint64_t>(3 * 4 * (64 * 4 + 4)));
}

// A run makes as many exchanges as its plan counts, beside the sum of d_hidden: none for one rank, or without
// tokens.
TEST_P(SparsifiedDeviceGroups, RunsExchangeWhatPlansCount) {
  for (const int64_t tokens : {64, 0}) {
    const Case c = sparsified(plain(5, {tokens, 300, 8}), 0.25);
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

// All columns that are seen before the draw are masked, targets included.
TEST_P(SparsifiedDeviceGroups, EstimateOfNothing) {
  Case c = masked({30, 2000, 8}, 1.0 / 16, 900, 902);
  for (size_t i = 0; i < c.targets.size(); ++i) c.targets[i] = static_cast<int64_t>(i % 3);
  const Sizes sizes{1500, 500};
  Case unmasked = c;  // has the same lse
  unmasked.problem.vocab = 2;
  unmasked.weight.assign(c.weight.begin() + 900 * 8, c.weight.begin() + 902 * 8);
  unmasked.bias.assign(2, 0.0);
  std::ranges::fill(unmasked.targets, 0);
  const Outputs got = solve_in_group(c, sizes);
  const Expected expected(unmasked);
  expect_lse(got.lse, expected.truth().lse, bounds_of(unmasked, sizes).lse);
}

TEST_P(SparsifiedDeviceGroups, NothingButMaskedColumns) {
  const Outputs got = solve_in_group(masked({30, 400, 8}, kKeepsAll, 0, 0), {250, 150});
  for (const double lse : got.lse) EXPECT_FALSE(std::isfinite(lse));
  EXPECT_FALSE(std::isfinite(got.loss[0]));
}

// Without rounding, targets' logits of fp32 operands would be so much above those of the products. Covers a
// column of the other rank that has most of a row.
TEST_P(SparsifiedDeviceGroups, RoundedTargets) {
  constexpr int64_t kTokens = 40, kVocab = 3000, kDepth = 8;
  Case c = sparsified(plain_case(7, {kTokens, kVocab, kDepth}, LOGITLESS_F32), 1.0 / 16);
  c.problem.compute_dtype = LOGITLESS_BF16;
  if (!engine().can_sparsify(c.problem)) GTEST_SKIP() << "operands are not rounded";
  remove_bias(&c);
  const double value = static_cast<float>(1.00375);  // becomes 1
  std::ranges::fill(c.hidden, value);
  for (const bool has_other : {false, true}) {
    std::ranges::fill(c.weight, 0.0);
    for (int64_t i = 0; i < kTokens; ++i) {
      const int64_t target = c.targets[static_cast<size_t>(i)] = 2 + 30 * i;  // on rank 0
      std::fill_n(c.weight.begin() + target * kDepth, kDepth, value);
    }
    if (has_other) {
      std::fill_n(c.weight.begin() + 2990 * kDepth, kDepth, 1.0);
      c.weight[2990 * kDepth] = 1 + 0x1p-7;
    }
    for (const double nats : {40.0, 95.0, 150.0}) {
      SCOPED_TRACE(testing::Message() << nats << ", a larger one " << has_other);
      c.problem.scale = nats / (kDepth * (value * value - 1));
      expect_lse_of_one_device(c, {1400, 1600}, 0.01);
    }
  }
}

// Targets' logits of large products that cancel would also be far off, if they were added up in another
// order.
TEST_P(SparsifiedDeviceGroups, TargetsThatCancel) {
  constexpr int64_t kTokens = 40, kVocab = 3000, kDepth = 16;
  Case c = sparsified(plain(7, {kTokens, kVocab, kDepth}), 1.0 / 16);
  remove_bias(&c);
  std::ranges::fill(c.hidden, 1.0);
  std::ranges::fill(c.weight, 0.0);
  for (size_t j = 0; j < c.weight.size(); j += kDepth) {
    c.weight[j] = 0x1p33;
    c.weight[j + 8] = -0x1p33;
    c.weight[j + 9] = -150;
  }
  for (int64_t i = 0; i < kTokens; ++i) c.targets[static_cast<size_t>(i)] = 2 + 30 * i;
  expect_lse_of_one_device(c, {1400, 1600}, 0.01);
}

// 1535 columns have fewer dense ones than 1536, so that more are left for the lists.
TEST_P(SparsifiedDeviceGroups, DrawsOfSmallerShards) {
  Case c = sparsified(plain(41, {40, 1536 + 1535, 8}), 1.0 / 1024);
  c.mode = Mode::kForwardThenBackward;
  c.problem.has.saved = 1;
  const Sizes sizes{1536, 1535};
  const Expected expected(c);
  EXPECT_NEAR(solve_in_group(c, sizes).loss[0], expected.truth().loss[0], bounds_of(c, sizes).loss);
}

// No shard needs more memory than the largest, or plans otherwise.
TEST_P(SparsifiedDeviceGroups, PlansOfAnyShard) {
  Random random(5);
  for (uint64_t n = 0; n < seeds(6000); ++n) {
    Case c = sparsified(plain(1, {1, 8, 8}), std::exp2(-static_cast<double>(random.integer(6, 12))));
    c.problem.has.bias = random.chance(0.5);
    c.problem.has.d_bias = c.problem.has.bias && random.chance(0.5);
    c.problem.has.d_weight = random.chance(0.5);
    const auto pass =
        random.pick({logitless::Pass::forward_backward, logitless::Pass::forward, logitless::Pass::backward});
    c.problem.has.saved = pass != logitless::Pass::forward_backward;
    logitless::Problem p = pass_problem(c, pass);
    p.tokens = random.chance(0.5) ? random.integer(1, 400) : random.integer(900, 6000);
    p.hidden = random.chance(0.5) ? 8 * random.integer(1, 16) : random.integer(1, 600);
    if (random.chance(0.25)) p.gradient = LOGITLESS_SPARSIFIED;
    // Around the multiples at which another 8 columns are dense, or frequent.
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
      EXPECT_EQ(plan.saved_bytes, of_largest.saved_bytes);
    }
  }
}

LOGITLESS_TEST_ON(SparsifiedDeviceGroups, device_engines());

}  // namespace
}  // namespace logitless_test
