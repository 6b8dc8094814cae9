// A number that is added to all logits of a row changes no probability. Gradients, losses of differences and
// entropy are as exact as without it, whichever way it comes in. All logits are exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {
namespace {

constexpr int64_t kTokens = 12, kVocab = 600, kFeatures = 3, kHidden = kFeatures + 2;

// The input that the offset comes through. The last two features are 1 in every row of hidden; in the
// weight's rows they add up to the offset.
enum class By { kBias, kWeight, kScale };

struct Variant {
  By by;
  double offset;
};

class CommonOffset : public EngineTest {
 protected:
  // A case whose logits are multiples of `step`, without an offset.
  Case base(double step) const { return base(step, engine().plain_dtype()); }
  static Case base(double step, logitless_dtype dtype) {
    Case c = plain_case(3, {kTokens, kVocab, kHidden}, dtype);
    logitless::Problem& p = c.problem;
    p.dtype.bias = p.dtype.d_hidden = p.dtype.d_weight = p.dtype.d_bias = stats_dtype(p);
    p.has.entropy = 1;
    Random random(7);
    for (size_t i = 0; i < kTokens; ++i) {
      for (size_t k = 0; k < kHidden; ++k) {
        c.hidden[i * kHidden + k] = k < kFeatures ? static_cast<double>(random.integer(-2, 2)) : 1;
      }
    }
    for (size_t j = 0; j < kVocab; ++j) {
      for (size_t k = 0; k < kHidden; ++k) {
        c.weight[j * kHidden + k] = k < kFeatures ? step * static_cast<double>(random.integer(-8, 8)) : 0;
      }
    }
    std::fill(c.bias.begin(), c.bias.end(), 0);
    return c;
  }

  static void add_offset(Case* c, const Variant& v) {
    if (v.by == By::kBias) std::fill(c->bias.begin(), c->bias.end(), v.offset);
    const double high = rounded(v.offset, LOGITLESS_BF16);
    const double scale = v.by == By::kScale ? v.offset : 1;
    if (v.by == By::kScale) c->problem.scale = scale;
    for (size_t j = 0; j < kVocab && v.by != By::kBias; ++j) {
      double* row = c->weight.data() + j * kHidden;
      for (size_t k = 0; k < kFeatures; ++k) row[k] /= scale;
      row[kFeatures] = v.by == By::kScale ? 1 : high;
      row[kFeatures + 1] = v.by == By::kScale ? 0 : v.offset - high;
    }
  }

  // Gradients without the columns that hold the offset; the weight's gradient is multiplied by the factor.
  template <class Gradients>
  static Outputs features(const Gradients& of, double factor = 1) {
    Outputs out;
    out.d_hidden = features(of.d_hidden, 1);
    out.d_weight = features(of.d_weight, factor);
    out.d_bias = of.d_bias;
    return out;
  }
  static std::vector<double> features(const std::vector<double>& matrix, double factor) {
    std::vector<double> out;
    for (size_t k = 0; k < matrix.size(); ++k) {
      if (k % kHidden < kFeatures) out.push_back(factor * matrix[k]);
    }
    return out;
  }

  // The ways to a gradient, and those with upstream gradients of the entropy and of lse.
  std::vector<Case> ways_with_upstream(const Case& c) const {
    std::vector<Case> out = ways(c, 1);
    Case upstream = c;
    upstream.problem.has.grad_entropy = upstream.problem.has.grad_lse = 1;
    upstream.grad_entropy.assign(kTokens, 0.5);
    upstream.grad_lse.assign(kTokens, -0.25);
    for (const Case& way : ways(upstream, 1)) {
      if (way.mode == Mode::kForwardThenBackward) out.push_back(way);
    }
    return out;
  }

  // Cases of losses and statistics that depend on differences alone.
  static std::vector<Case> losses(const Case& c) {
    std::vector<Case> out;
    for (int32_t reduction : {LOGITLESS_REDUCTION_MEAN, LOGITLESS_REDUCTION_NONE}) {
      for (double smoothing : {0.0, 0.5, 1.0}) {
        for (bool weights : {false, true}) {
          Case way = c;
          way.mode = reduction == LOGITLESS_REDUCTION_MEAN ? Mode::kForwardBackward : Mode::kForward;
          way.problem.reduction = reduction;
          way.problem.label_smoothing = smoothing;
          way.problem.has.class_weight = weights;
          way.problem.has.log_sum_sq_probs = 1;
          for (size_t j = 0; j < kVocab && weights; ++j)
            way.class_weight.push_back(0.3 * static_cast<double>(j % 7 + 1));
          for (double& w : way.class_weight) w = rounded(w, stats_dtype(c.problem));
          out.push_back(way);
        }
      }
    }
    return out;
  }

  // CUDA's sums of w z are sums of the logits themselves, in the precision of the statistics
  // (docs/numerics.md).
  double smoothing_error(const Case& c, const Answer& truth, double offset) const {
    if (!is_device()) return 0;
    const double unit = c.problem.dtype.hidden == LOGITLESS_F64 ? 0x1p-53 : 0x1p-24;
    double weights = c.class_weight.empty() ? kVocab : 0;
    for (double w : c.class_weight) weights += w;
    const double tiles = std::ceil(kVocab / 192.0), largest = std::fabs(offset) + 6;
    const double of_row =
        c.problem.label_smoothing * (51 + tiles) * unit * largest * weights / double{kVocab};
    return c.problem.reduction == LOGITLESS_REDUCTION_NONE ? of_row : of_row * kTokens / truth.divisor;
  }
};

TEST_P(CommonOffset, ChangesNoGradient) {
  const Case plain = base(0x1p-3);
  size_t place = 0;
  for (const Case& way : ways_with_upstream(plain)) {
    const Expected expected(way);
    const Answer& truth = expected.truth();
    const Bounds bounds = expected.bounds_of(engine());
    for (const Variant& v : {Variant{By::kBias, 0},
                             {By::kBias, 100},
                             {By::kBias, -1e3},
                             {By::kBias, 1e4},
                             {By::kBias, 1e5},
                             {By::kBias, -1e6},
                             {By::kWeight, 1e3},
                             {By::kWeight, -1e5},
                             {By::kWeight, 1e6},
                             {By::kScale, 0x1p10},
                             {By::kScale, 0x1p20}}) {
      if (is_slowed_down() && place++ % 4 != 0) continue;  // 11 is no multiple: other ways take others
      SCOPED_TRACE(testing::Message() << "by " << static_cast<int>(v.by) << ", offset " << v.offset
                                      << ", sparsified " << way.problem.gradient);
      Case c = way;
      add_offset(&c, v);
      const Outputs got = solve(c);
      SCOPED_TRACE(describe(c));
      const double unscale = 1 / c.problem.scale;
      EXPECT_TRUE(close("nll", got.nll, truth.nll, bounds.nll, LOGITLESS_F32));
      EXPECT_TRUE(close("entropy", got.entropy, truth.entropy, bounds.entropy, LOGITLESS_F32));
      expect_gradients(features(got, unscale), features(truth), bounds);
    }
  }
}

// The z-loss does depend on the offset: its gradient is 2 z_loss lse p.
TEST_P(CommonOffset, AZLossDependsOnIt) {
  for (double offset : {100.0, 1e4, 1e6}) {
    Case c = base(0x1p-3);
    const Bounds bounds = Expected(c).bounds_of(engine());
    add_offset(&c, {By::kBias, offset});
    c.problem.z_loss = 1 / offset;
    const Answer truth = materialise<double>(c);
    for (const Case& way : ways(c, 1)) {
      if (way.problem.reduction != LOGITLESS_REDUCTION_MEAN) continue;
      SCOPED_TRACE(describe(way));
      const Outputs got = solve(way);
      const double factor = 1 + 2.1;  // 2 z_loss lse
      expect_gradients(features(got), features(truth), factor * bounds);
      // A device rounds the losses of rows.
      const double error = bounds.loss + 2.1 * bounds.lse + 0x1p-24 * truth.loss[0];
      EXPECT_TRUE(close("loss", got.loss, truth.loss, error, LOGITLESS_F32));
    }
  }
}

// Covers logits to which the offset leaves their last digits, and logits that are all the same.
TEST_P(CommonOffset, ChangesNoLossOfDifferences) {
  struct Logits {
    logitless_dtype dtype;
    double step;
    std::vector<Variant> variants;
  };
  constexpr double far = 0x1p50, further = -0x1p70;
  for (const Logits& logits : std::vector<Logits>{
           {LOGITLESS_F32, 0x1p-3, {{By::kBias, 1e3}, {By::kBias, -1e5}, {By::kWeight, 0x1p19}}},
           {LOGITLESS_BF16, 0x1p-3, {{By::kBias, 1e3}, {By::kBias, -1e5}, {By::kWeight, 0x1p19}}},
           {LOGITLESS_F64, 0x1p-3, {{By::kBias, 1e6}, {By::kBias, -0x1p45}, {By::kWeight, 0x1p40}}},
           {LOGITLESS_F32, 0, {{By::kBias, far}, {By::kBias, further}, {By::kWeight, far}}},
           {LOGITLESS_BF16, 0, {{By::kBias, far}, {By::kBias, further}, {By::kWeight, far}}},
           {LOGITLESS_F64, 0, {{By::kBias, 1e15}, {By::kBias, further}, {By::kWeight, 1e15}}}}) {
    const Case plain = base(logits.step, logits.dtype);
    if (!engine().can_run(plain.problem)) continue;
    const logitless_dtype stats = stats_dtype(plain.problem);
    for (const Case& c : losses(plain)) {
      const Expected expected(c);
      const Answer& truth = expected.truth();
      const Bounds bounds = expected.bounds_of(engine());
      for (const Variant& v : logits.variants) {
        Case moved = c;
        add_offset(&moved, v);
        SCOPED_TRACE(testing::Message() << "offset " << v.offset << ", step " << logits.step << ", weights "
                                        << c.class_weight.size() << ", " << describe(moved));
        const Outputs got = solve(moved);
        const double error = bounds.loss + smoothing_error(c, truth, v.offset);
        EXPECT_TRUE(close("loss", got.loss, truth.loss, error, stats));
        EXPECT_TRUE(close("nll", got.nll, truth.nll, bounds.nll, stats));
        EXPECT_TRUE(close("entropy", got.entropy, truth.entropy, bounds.entropy, stats));
        EXPECT_TRUE(close("log_sum_sq_probs", got.log_sum_sq_probs, truth.log_sum_sq_probs,
                          bounds.log_sum_sq_probs, stats));
        if (c.mode == Mode::kForward) continue;
        EXPECT_TRUE(close("d_bias", got.d_bias, truth.d_bias, bounds.d_bias, stats));
      }
    }
  }
}

// A target's logit from unrounded operands may be far above all logits of the product, whose operands are
// rounded. Plans of many windows then lose no exp logits, and agree with the plan of one.
TEST_P(CommonOffset, TargetsOfUnroundedOperands) {
  Case c = plain_case(3, {2, 1000, 8}, LOGITLESS_F32);
  c.problem.compute_dtype = LOGITLESS_BF16;
  c.problem.has.log_sum_sq_probs = 1;
  if (!is_device() || !engine().can_run(c.problem)) GTEST_SKIP();
  constexpr double kDown = 1.00385;  // bf16 rounds it by 2^-8 of itself
  std::ranges::fill(c.hidden, 0);
  std::ranges::fill(c.weight, 0);
  std::ranges::fill(c.targets, 3);
  for (size_t i = 0; i < 2; ++i) c.hidden[8 * i] = kDown, c.hidden[8 * i + 1] = 4;
  for (size_t j = 0; j < 1000; ++j) c.weight[8 * j] = 16384 * kDown, c.weight[8 * j + 1] = j == 3 ? 0 : -1;
  for (std::vector<double>* values : {&c.hidden, &c.weight}) {
    for (double& value : *values) value = rounded(value, LOGITLESS_F32);
  }
  // Half a rounding unit of these logits is 2^-10, and dz is rounded to bf16 in one plan and not in another.
  const Outputs one = solve(c, LOGITLESS_FASTEST);
  for (size_t budget : {20'000, 27'000, 40'000, 60'000}) {
    const Outputs got = solve(c, budget);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_NEAR(got.nll[i], one.nll[i], 1e-3) << budget;
      EXPECT_NEAR(got.log_sum_sq_probs[i], one.log_sum_sq_probs[i], 1e-3) << budget;
    }
    for (size_t k = 0; k < one.d_weight.size(); ++k) {
      ASSERT_NEAR(got.d_weight[k], one.d_weight[k], 0x1p-6 * std::fabs(one.d_weight[3 * 8])) << budget;
    }
  }
}

// Offsets beyond the integers of float32 give finite gradients, of the right sign and size.
TEST_P(CommonOffset, BeyondTheIntegers) {
  const Case plain = base(8);
  for (const Case& way : ways_with_upstream(plain)) {
    const Answer truth = materialise<double>(way);
    for (double offset : {0x1p24, 1e8}) {
      Case c = way;
      add_offset(&c, {By::kBias, offset});
      SCOPED_TRACE(testing::Message()
                   << "offset " << offset << ", sparsified " << way.problem.gradient << ", " << describe(c));
      const Outputs got = solve(c);
      double largest = 0;
      for (double d : truth.d_bias) largest = std::max(largest, std::fabs(d));
      for (size_t j = 0; j < truth.d_bias.size(); ++j) {
        ASSERT_NEAR(got.d_bias[j], truth.d_bias[j], 0.01 * largest) << j;
      }
      for (size_t k = 0; k < truth.d_hidden.size(); ++k) {
        ASSERT_TRUE(std::isfinite(got.d_hidden[k]));
        if (k % kHidden >= kFeatures || std::fabs(truth.d_hidden[k]) < 0.1 * largest) continue;
        EXPECT_GT(got.d_hidden[k] * truth.d_hidden[k], 0) << k;
      }
    }
  }
}

// With shards of the vocabulary, lse_residual comes from the merged statistics.
TEST_P(CommonOffset, MergedStatistics) {
  Case c = base(0x1p-3);
  c.mode = Mode::kForwardThenBackward;
  c.problem.has.entropy = 0;
  const Expected expected(c);
  add_offset(&c, {By::kBias, 1e5});
  const Outputs whole = solve(c);
  const logitless::Problem problem = pass_problem(c, logitless::Pass::forward);
  RunTensors tensors(problem, c);
  tensors.add_inputs();
  tensors.add_statistics(whole);
  tensors.add_losses();
  logitless::loss_from_row_stats(logitless::Plan(context_, problem), tensors.buffers());
  const Outputs known = tensors.read();
  for (size_t i = 0; i < kTokens; ++i) {
    const double log_sum = std::log(whole.sum_exp[i]) + (whole.max[i] - 1e5);
    EXPECT_NEAR((known.lse[i] - 1e5) + known.lse_residual[i], log_sum, 1e-6) << i;
  }
  const Outputs got = run_pass(context_, pass_problem(c, logitless::Pass::backward), c, &known);
  const Bounds bounds = expected.bounds_of(engine());
  EXPECT_TRUE(close("d_bias", got.d_bias, expected.truth().d_bias, bounds.d_bias, LOGITLESS_F32));
}

LOGITLESS_TEST_ON(CommonOffset, engines());

}  // namespace
}  // namespace logitless_test
