// Sparsified gradients of one draw: exact where everything is kept, the same for the same seed, and with
// correct reports.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sparsified_fixture.h"

namespace logitless_test {
namespace {

constexpr const char* kPortableSkip = "draws and sums follow the blocks of logits that the budget holds";

class Sparsified : public SparsifiedTest {
 protected:
  std::vector<Case> random_cases(uint64_t first, uint64_t count, int64_t largest) const {
    std::vector<Case> out;
    for (uint64_t seed = first; seed < first + count; ++seed) {
      Case c = random_case(seed, {.largest_dimension = largest, .allow_fp64 = engine().is_reference()});
      if (engine().can_run(c.problem) && engine().can_sparsify(c.problem)) out.push_back(std::move(c));
    }
    return out;
  }

  // More columns than a window of blocks, on the fast engines.
  Case large_case(logitless_dtype dtype) const {
    Case c = engine().is_reference() ? plain_case(11, {20, 150, 20}, dtype)
                                     : plain_case(11, {70, is_slowed_down() ? 1500 : 9000, 33}, dtype);
    c.mode = Mode::kForwardThenBackward;
    return c;
  }
};

TEST_P(Sparsified, IsExactWhereAllIsKept) {
  for (const Case& c : random_cases(0, seeds(100), 300)) {
    const Expected expected(c);
    for (int32_t keeps : {0, 1}) {
      Case t = as_sparsified(c, kKeepsAll, 5);
      t.problem.has.saved = keeps;
      SCOPED_TRACE(testing::Message() << "keeps draws " << keeps << ", " << describe(c));
      const Outputs got = solve(t);
      expected.check(got, expected.bounds_of(engine()));
      for (double variance : got.draw_variance) EXPECT_TRUE(variance == 0 || std::isnan(variance));
    }
  }
}

// Covers every length of lists that a vocabulary gives: CUDA's kernels put them in order in shared memory.
TEST_P(Sparsified, IsExactForAnyLengthOfLists) {
  for (int64_t vocab : {2000, 3300, 4100, 4700, 5100, 5120, 5160, 6300, 8000}) {
    const Case c = plain_case(13, {3, vocab, 5}, engine().plain_dtype());
    SCOPED_TRACE(testing::Message() << "vocabulary " << vocab);
    const Expected expected(c);
    expected.check(solve(as_sparsified(c, kKeepsAll, 5)), expected.bounds_of(engine()));
  }
}

// Some columns are kept in every row, the others in half of the rows. CUDA's kernels leave such columns to
// products, and need many columns to choose from.
TEST_P(Sparsified, IsExactWhereAllIsKeptOfSomeColumns) {
  Case c = plain_case(12, {200, is_device() ? 3000 : 300, 3}, engine().plain_dtype());
  Random random(5);
  for (size_t i = 0; i < 200; ++i) {
    c.hidden[3 * i] = i % 2 == 0 ? 1 : -1;
    c.hidden[3 * i + 1] = 1;
    c.hidden[3 * i + 2] = std::round(random.uniform(-64, 64)) / 64;
  }
  for (size_t j = 0; j < c.bias.size(); ++j) {
    const bool everywhere = j < 240 && j % 20 == 7;
    c.weight[3 * j] = everywhere ? 0 : j % 2 == 0 ? 150 : -150;
    c.weight[3 * j + 1] = everywhere ? 0 : -150;
    c.weight[3 * j + 2] = std::round(random.uniform(-64, 64)) / 64;
    c.bias[j] = 0;
  }
  for (size_t i = 0; i < 200; ++i) {
    c.targets[i] = static_cast<int64_t>(random.uniform(250, static_cast<double>(c.bias.size()) - 1));
  }
  for (double smoothing : {0.0, 0.1}) {
    c.problem.label_smoothing = smoothing;
    const Expected expected(c);
    for (int32_t keeps : {0, 1}) {
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        if (keeps == 1 && mode == Mode::kForwardBackward) continue;
        Case t = as_sparsified(c, kKeepsAll, 5);
        t.mode = mode;
        t.problem.has.saved = keeps;
        SCOPED_TRACE(testing::Message() << "smoothing " << smoothing << ", keeps draws " << keeps);
        const Outputs got = solve(t);
        expected.check(got, expected.bounds_of(engine()));
        EXPECT_STREQ(first_difference(solve(t), got), "");
      }
    }
  }
}

TEST_P(Sparsified, LossIsThatOfExact) {
  if (is_device()) GTEST_SKIP() << "sums have another logit_offset there; IsExact compares the losses";
  for (Case c : random_cases(300, seeds(60), 1100)) {
    const Outputs exact = solve(c);
    Outputs got = solve(as_sparsified(c, 0.01, 7));
    got.d_hidden = exact.d_hidden;
    got.d_weight = exact.d_weight;
    got.d_bias = exact.d_bias;
    got.kept_count.clear();
    got.draw_variance.clear();
    EXPECT_STREQ(first_difference(got, exact), "") << describe(c);
  }
}

// Compares the smallest plan and the fastest.
TEST_P(Sparsified, SameBitsForAnyBudgetSlow) {
  if (engine().name() == "cuda_portable") GTEST_SKIP() << kPortableSkip;
  for (Case c : {large_case(engine().plain_dtype()), large_case(LOGITLESS_BF16)}) {
    c.mode = Mode::kForwardBackward;
    const Case t = as_sparsified(c, 0x1p-8, 9);
    const logitless::Problem problem = pass_problem(t, logitless::Pass::forward_backward);
    for (const logitless::PlanInfo& plan : context_.plans(problem)) {
      EXPECT_EQ(plan.kind, LOGITLESS_PLAN_SPARSIFIED);
    }
    logitless::Problem tight = problem;
    tight.max_workspace_bytes = 1;
    EXPECT_THROW(logitless::Plan(context_, tight), logitless::Error);
    const size_t smallest = std::min(*plan_bytes(problem).begin(), *plan_bytes(tight).begin());
    EXPECT_STREQ(first_difference(solve(t, smallest), solve(t)), "");
  }
}

// One forward pass' draws serve as those that the backward pass of a single run makes.
TEST_P(Sparsified, KeptDrawsGiveTheSameBits) {
  if (engine().is_reference()) GTEST_SKIP() << "a single run has an lse of float64, a backward pass has not";
  if (engine().name() == "cuda_portable") GTEST_SKIP() << kPortableSkip;
  for (Case c : random_cases(600, seeds(60), 700)) {
    if (c.mode == Mode::kForward) continue;
    c.problem.has.grad_nll = c.problem.has.grad_lse = c.problem.has.grad_entropy = 0;
    c.problem.has.grad_target_logit = 0;
    if (c.problem.reduction == LOGITLESS_REDUCTION_NONE && c.grad_loss.empty()) {
      c.grad_loss.assign(static_cast<size_t>(c.problem.tokens), 1);
    }
    Case t = as_sparsified(c, 0x1p-6, 11);
    t.mode = Mode::kForwardBackward;
    const Outputs at_once = solve(t);
    t.mode = Mode::kForwardThenBackward;
    t.problem.has.saved = 1;
    EXPECT_STREQ(first_difference(solve(t), at_once), "") << describe(c);
  }
}

TEST_P(Sparsified, OtherSeedOtherDraw) {
  const Case c = large_case(engine().plain_dtype());
  logitless::Problem problem = pass_problem(as_sparsified(c, 0x1p-5, 1), logitless::Pass::forward_backward);
  const Outputs one = run_pass(context_, problem, c);
  for (int64_t seed : {int64_t{2}, int64_t{-1}, int64_t{1} + (int64_t{1} << 32)}) {
    problem.seed = seed;
    EXPECT_NE(run_pass(context_, problem, c).d_hidden, one.d_hidden) << seed;
  }
}

// A row keeps every p >= threshold, the target, and at most about 1 / threshold of the others.
TEST_P(Sparsified, KeptCounts) {
  for (Case c : random_cases(700, seeds(40), 600)) {
    if (!c.wants_gradients()) continue;
    for (double threshold : {0.5, 0x1p-5, 0x1p-9}) {
      const Outputs got = solve(as_sparsified(c, threshold, 3));
      const Answer truth = materialise<double>(c);
      const auto vocab = static_cast<size_t>(c.problem.vocab);
      for (size_t i = 0; i < got.kept_count.size(); ++i) {
        const int64_t target = c.target_of(static_cast<int64_t>(i));
        if (target == c.problem.ignore_index) {
          EXPECT_EQ(got.kept_count[i], 0);
          EXPECT_EQ(got.draw_variance[i], 0);
          continue;
        }
        double sure = 1;
        for (size_t j = 0; j < vocab; ++j) {
          const double p = std::exp(truth.logits[i * vocab + j] - truth.lse[i]);
          sure += static_cast<int64_t>(j) != target && p > 1.001 * threshold;
        }
        EXPECT_GE(got.kept_count[i], sure) << describe(c);
        const double dense = is_device() ? 8.0 + static_cast<double>(vocab) / 96 : 0;
        EXPECT_LE(got.kept_count[i], std::min(static_cast<double>(vocab), most_kept(threshold) + dense + 1))
            << describe(c);
      }
    }
  }
}

// The estimated variance is that of the draws: over many seeds the squared error of dz, which is d_hidden
// where the weight is the identity.
TEST_P(Sparsified, EstimatesItsVariance) {
  constexpr int64_t kVocab = 64;
  constexpr int64_t kTokens = 8;
  Case c = plain_case(21, {kTokens, kVocab, kVocab}, engine().plain_dtype());
  std::fill(c.weight.begin(), c.weight.end(), 0);
  for (size_t j = 0; j < kVocab; ++j) c.weight[j * kVocab + j] = 1;
  c.problem.dtype.d_hidden = LOGITLESS_F32;
  const Answer truth = materialise<double>(c);
  const int64_t seed_count = is_emulated() ? 100 : 400;
  double error = 0, norm = 0, estimated = 0;
  for (double value : truth.d_hidden) norm += value * value;
  for (int64_t seed = 0; seed < seed_count; ++seed) {
    const Outputs got = run_pass(
        context_, pass_problem(as_sparsified(c, 0x1p-4, seed), logitless::Pass::forward_backward), c);
    for (size_t k = 0; k < truth.d_hidden.size(); ++k) {
      error += std::pow(got.d_hidden[k] - truth.d_hidden[k], 2);
    }
    for (size_t i = 0; i < kTokens; ++i) {
      double row = 0;
      for (size_t k = 0; k < kVocab; ++k) row += std::pow(truth.d_hidden[i * kVocab + k], 2);
      estimated += got.draw_variance[i] * row;
    }
  }
  EXPECT_GT(error, 0);
  // 800 or 3,200 rows have some ten drawn elements each, so both sums are known to one or two percent. The
  // quotient of two estimates adds as much as a row's relative variance.
  EXPECT_NEAR(estimated / error, 1, is_emulated() ? 0.2 : 0.1)
      << error / (static_cast<double>(seed_count) * norm);
}

LOGITLESS_TEST_ON(Sparsified, engines());

}  // namespace
}  // namespace logitless_test
