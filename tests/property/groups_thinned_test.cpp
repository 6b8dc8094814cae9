// Thinned gradients in groups of ranks: the same seed keeps the same elements for any cut of the vocabulary,
// which are those of the float64 reference on one device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "compare.h"
#include "rank_group.h"

namespace headroom_test {
namespace {

using Sizes = std::vector<int64_t>;

class ThinnedGroups : public testing::TestWithParam<Engine> {
 protected:
  static Case thinned(Case c, double threshold) {
    headroom::Problem& p = c.problem;
    p.gradient = HEADROOM_ALWAYS_THINNED;
    p.threshold = threshold;
    p.top_k = 0;
    p.accumulate_d_hidden = p.accumulate_d_classifier = p.accumulate_d_bias = 0;
    c.d_hidden_start.clear();
    c.d_classifier_start.clear();
    c.d_bias_start.clear();
    c.d_hidden_layout = {};
    if (p.hidden_dtype != HEADROOM_F64) {
      p.d_hidden_dtype = p.d_classifier_dtype = p.d_bias_dtype = HEADROOM_F32;
    }
    return c;
  }

  Outputs run_ranks(const Case& c, headroom::Pass pass, const Sizes& sizes, const Outputs* known,
                    size_t budget) const {
    std::vector<Outputs> found(sizes.size());
    RankGroup group(static_cast<int>(sizes.size()), false);
    group.run([&](int rank, const headroom::Communicator& communicator) {
      headroom::Problem p = pass_problem(c, pass);
      p.vocab = sizes[static_cast<size_t>(rank)];
      p.max_workspace_bytes = budget;
      int64_t start = 0;
      for (int before = 0; before < rank; ++before) start += sizes[static_cast<size_t>(before)];
      headroom::set_group(p, static_cast<int32_t>(sizes.size()), start, c.problem.vocab,
                          std::ranges::max(sizes));
      Outputs mine;  // draws are each rank's own
      if (known != nullptr) mine = *known;
      if (p.keeps_draws && known != nullptr) mine.draws = draws_[static_cast<size_t>(rank)];
      found[static_cast<size_t>(rank)] =
          run_pass(context_, p, c, known == nullptr ? nullptr : &mine, &communicator);
    });
    Outputs out = found[0];
    out.d_classifier.clear();
    out.d_bias.clear();
    draws_.clear();
    for (const Outputs& each : found) {
      EXPECT_TRUE(same_bits(each.loss, out.loss) && same_bits(each.lse, out.lse)) << "between ranks";
      out.d_classifier.insert(out.d_classifier.end(), each.d_classifier.begin(), each.d_classifier.end());
      out.d_bias.insert(out.d_bias.end(), each.d_bias.begin(), each.d_bias.end());
      draws_.push_back(each.draws);
    }
    return out;
  }

  Outputs solve_in_group(const Case& c, const Sizes& sizes, size_t budget = 0) const {
    if (c.mode == Mode::kForwardBackward) {
      return run_ranks(c, headroom::Pass::forward_backward, sizes, nullptr, budget);
    }
    Outputs out = run_ranks(c, headroom::Pass::forward, sizes, nullptr, budget);
    Outputs gradients = run_ranks(c, headroom::Pass::backward, sizes, &out, budget);
    out.d_hidden = std::move(gradients.d_hidden);
    out.d_classifier = std::move(gradients.d_classifier);
    out.d_bias = std::move(gradients.d_bias);
    return out;
  }

  // Of the same elements: each run is off by its own rounding, and each rank's part of d_hidden is rounded.
  void expect_same_elements(const Case& c, const Sizes& sizes, const Outputs& reference) const {
    expect_same_elements(c, sizes, reference, Expected(c).bounds_of(GetParam()));
  }
  void expect_same_elements(const Case& c, const Sizes& sizes, const Outputs& reference,
                            const Bounds& of_one) const {
    SCOPED_TRACE(testing::Message() << describe(c) << "\ncut into " << testing::PrintToString(sizes));
    Bounds bounds = static_cast<double>(sizes.size() + 2) * of_one;
    bounds.lse += static_cast<double>(sizes.size()) * 0x1p-24;
    expect_same_results(c, reference, solve_in_group(c, sizes), bounds);
  }

  headroom::Context context_ = make_context(GetParam(), 2);
  headroom::Context reference_ = make_context({"reference", ""}, 2);
  mutable std::vector<std::vector<double>> draws_;  // of the last forward pass, a rank each
};

TEST_P(ThinnedGroups, TheSameElementsForAnyCut) {
  Case c = thinned(plain_case(41, {60, 3000, 24}, GetParam().plain_dtype()), 1.0 / 64);
  for (size_t i = 0; i < c.hidden.size() / 2; ++i) c.hidden[i] *= 2;  // some rows more peaked than others
  c.targets[5] = c.problem.ignore_index;
  for (const double smoothing : {0.0, 0.25}) {
    c.problem.label_smoothing = smoothing;
    const Bounds bounds = Expected(c).bounds_of(GetParam());
    for (const int64_t seed : {7, 8}) {
      c.problem.seed = seed;
      c.mode = Mode::kForwardBackward;
      c.problem.keeps_draws = 0;
      const Outputs reference = solve(reference_, c);
      for (const Sizes& sizes :
           {Sizes{3000}, Sizes{1500, 1500}, Sizes{17, 0, 2983}, Sizes{449, 1000, 1, 1550}}) {
        for (const bool keeps : {false, true}) {
          for (const Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
            c.mode = mode;
            c.problem.keeps_draws = keeps && mode == Mode::kForwardThenBackward;
            expect_same_elements(c, sizes, reference, bounds);
          }
        }
      }
      c.problem.seed = seed + 100;  // other elements are further away than that
      EXPECT_FALSE(close("d_hidden", solve(reference_, c).d_hidden, reference.d_hidden, 4 * bounds.d_hidden,
                         HEADROOM_F32));
    }
  }
}

TEST_P(ThinnedGroups, RandomProblems) {
  uint64_t done = 0;
  for (uint64_t seed = 0; done < seeds(60); ++seed) {
    Case c = thinned(random_case(seed, {.largest_dimension = 400, .allow_fp64 = GetParam().has_float64()}),
                     1.0 / 32);
    if (c.mode == Mode::kForward || !GetParam().can_thin(c.problem)) continue;
    ++done;
    Random random(seed);
    const int64_t first = random.integer(0, c.problem.vocab),
                  second = random.integer(0, c.problem.vocab - first);
    expect_same_elements(c, {first, second, c.problem.vocab - first - second}, solve(reference_, c));
  }
}

TEST_P(ThinnedGroups, TheMeanOverSeedsIsTheGradient) {
  Case c = thinned(plain_case(3, {6, 90, 5}, GetParam().plain_dtype()), 0.25);
  const Expected expected(c);
  const Answer& truth = expected.truth();
  const int seed_count = is_slowed_down() ? 150 : 1000;
  std::vector<double> sum(truth.d_hidden.size()), squares(truth.d_hidden.size());
  for (int seed = 0; seed < seed_count; ++seed) {
    c.problem.seed = seed;
    const Outputs got = solve_in_group(c, {40, 50});
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += got.d_hidden[i];
      squares[i] += got.d_hidden[i] * got.d_hidden[i];
    }
  }
  for (size_t i = 0; i < sum.size(); ++i) {
    const double mean = sum[i] / seed_count, variance = squares[i] / seed_count - mean * mean;
    EXPECT_NEAR(mean, truth.d_hidden[i], 5 * std::sqrt(variance / seed_count) + 1e-6)
        << "d_hidden[" << i << "]";
  }
}

// Lists that fill up early are thinned by what a rank knows of lse, which is less than all do.
TEST_P(ThinnedGroups, FlatRowsOfManyColumns) {
  Case c = thinned(plain_case(5, {20, 9000, 8}, GetParam().plain_dtype()), 1.0 / 16);
  for (double& value : c.hidden) value /= 64;
  const Outputs reference = solve(reference_, c);
  expect_same_elements(c, {4500, 4500}, reference);
  expect_same_elements(c, {100, 8900}, reference);
}

TEST_P(ThinnedGroups, WhatIsRefused) {
  Case c = thinned(plain_case(5, {4, 30, 8}, GetParam().plain_dtype()), 0.25);
  headroom::Problem p = pass_problem(c, headroom::Pass::forward_backward);
  p.vocab = 10;
  headroom::set_group(p, 3, 0, 30, 10);
  const headroom::Plan plan(context_, p);
  EXPECT_EQ(plan.info().kind, HEADROOM_PLAN_THINNED);
  headroom::Buffers b;
  std::vector<float> some(300);
  std::vector<int64_t> targets(4);
  std::vector<int32_t> counts(4);
  b.hidden = b.classifier = b.bias = some.data();
  b.d_hidden = b.d_classifier = b.d_bias = some.data();
  b.targets = targets.data();
  b.kept_count = counts.data();
  try {
    std::vector<std::byte> memory(plan.info().workspace_bytes + 64);
    auto address = reinterpret_cast<uintptr_t>(memory.data()) % 64;
    headroom::Communicator communicator;
    communicator.size = 3;
    communicator.all_gather = [](const void*, void*, int64_t, int32_t, void*, void*) { return int32_t{0}; };
    communicator.all_reduce = [](void*, int64_t, int32_t, void*, void*) { return int32_t{0}; };
    headroom::run_group(plan, b, {memory.data() + (64 - address), plan.info().workspace_bytes}, communicator,
                        nullptr);
    FAIL() << "nothing was thrown";
  } catch (const headroom::Error& error) {
    EXPECT_STREQ(
        error.what(),
        "kept_count, draw_variance: expected null in a group of ranks, of which each knows its own elements "
        "alone, got a pointer");
  }
}

TEST(ThinnedGroupsOnDevices, AreRefusedByName) {
  for (const Engine& engine : device_engines()) {
    for (const int32_t gradient : {HEADROOM_THINNED, HEADROOM_ALWAYS_THINNED}) {
      const Case c = plain_case(5, {4, 30, 8}, engine.plain_dtype());
      headroom::Problem p = pass_problem(c, headroom::Pass::forward_backward);
      p.gradient = gradient;
      headroom::set_group(p, 3, 0, 90, 30);
      try {
        const headroom::Plan plan(make_context(engine), p);
        FAIL() << "nothing was thrown";
      } catch (const headroom::Error& error) {
        EXPECT_EQ(error.status(), HEADROOM_UNSUPPORTED);
        EXPECT_NE(std::string(error.what()).find("gradient must be exact in a group of ranks"),
                  std::string::npos)
            << error.what();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, ThinnedGroups, testing::ValuesIn(host_engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace headroom_test
