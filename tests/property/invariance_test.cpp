// Changes of a problem that must not change the results, or must change them in a known way. No oracle is
// needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "engine_test.h"

namespace logitless_test {
namespace {

class Invariance : public EngineTest {
 protected:
  // Random cases with gradients.
  std::vector<Case> cases(
      uint64_t seed, const std::function<void(Case*)>& change = [](Case*) {}) const {
    return random_cases(seed, 20, {.allow_fp64 = false}, [&](Case* c) {
      change(c);
      return c->mode != Mode::kForward;
    });
  }
};

// sum_j dz_ij is 0 but for the gradients that come through lse or the target's logit itself. The gradient of
// the bias is sum_i dz_ij.
TEST_P(Invariance, RowsOfLogitGradientsSumToZero) {
  const auto with_bias_gradient = [](Case* c) {
    Random random(c->seed);
    logitless::Problem& p = c->problem;
    p.has.bias = p.has.d_bias = 1;
    p.dtype.d_bias = LOGITLESS_F32;
    p.z_loss = p.softcap = p.accumulate.d_bias = 0;
    c->bias = normal_values(random, p.vocab, 1, static_cast<logitless_dtype>(p.dtype.bias));
    c->d_bias_start.clear();
  };
  for (const Case& c : cases(2000, with_bias_gradient)) {
    SCOPED_TRACE(describe(c));
    const Outputs got = solve(c);
    double through_logits = 0;
    for (const std::vector<double>* upstream : {&c.grad_lse, &c.grad_target_logit}) {
      for (size_t i = 0; i < upstream->size(); ++i) {
        if (c.target_of(static_cast<int64_t>(i)) != c.problem.ignore_index)
          through_logits += (*upstream)[i] / c.temperature_of(static_cast<int64_t>(i));
      }
    }
    const double sum = sum_of(got.d_bias);
    double rounding = 0;
    for (double d : got.d_bias) rounding += std::fabs(d) * 0x1p-24;
    const Expected expected(c);
    if (std::isnan(expected.truth().loss[0]) && c.problem.reduction == LOGITLESS_REDUCTION_MEAN) continue;
    EXPECT_NEAR(sum, through_logits,
                static_cast<double>(c.problem.vocab) * expected.bounds_of(engine()).d_bias + rounding);
  }
}

// A power of two times the upstream gradient is exactly that times the gradients.
TEST_P(Invariance, LinearInTheUpstreamGradient) {
  const auto float_gradients = [](Case* c) {
    logitless::Problem& p = c->problem;
    p.dtype.d_hidden = p.dtype.d_weight = p.dtype.d_bias = LOGITLESS_F32;
    p.accumulate.d_hidden = p.accumulate.d_weight = p.accumulate.d_bias = 0;
    const bool per_row = p.reduction == LOGITLESS_REDUCTION_NONE;
    if (c->grad_loss.empty()) c->grad_loss.assign(per_row ? static_cast<size_t>(p.tokens) : 1, 0.75);
  };
  for (const Case& c : cases(3000, float_gradients)) {
    SCOPED_TRACE(describe(c));
    Case larger = c;
    for (auto* upstream : {&larger.grad_loss, &larger.grad_nll, &larger.grad_lse, &larger.grad_entropy,
                           &larger.grad_target_logit}) {
      for (double& value : *upstream) value *= 4;
    }
    Outputs once = solve(c);
    for (auto* gradient : {&once.d_hidden, &once.d_weight, &once.d_bias}) {
      for (double& value : *gradient) value *= 4;
    }
    EXPECT_STREQ(first_difference(solve(larger), once), "");
  }
}

TEST_P(Invariance, PermutationOfTheRows) {
  const auto unshifted = [](Case* c) { c->problem.shift = 0; };
  for (const Case& c : cases(4000, unshifted)) {
    const auto tokens = static_cast<size_t>(c.problem.tokens);
    const std::vector<size_t> order = shuffled_rows(tokens, c.seed);
    Outputs expected = solve(c);
    const auto reorder = [&](std::vector<double>* rows) { *rows = rows_of(*rows, tokens, order); };
    for (auto* rows :
         {&expected.nll, &expected.lse, &expected.entropy, &expected.target_logit, &expected.max_logit,
          &expected.mean_logit, &expected.log_sum_sq_probs, &expected.d_hidden}) {
      reorder(rows);
    }
    if (c.problem.reduction == LOGITLESS_REDUCTION_NONE) reorder(&expected.loss);
    expect_same_results(c, solve(rows_of(c, order)), expected, 2 * bounds_of(c));
  }
}

// Strides, alignment and the targets' width change no bit; on a device, nothing but rounding.
TEST_P(Invariance, PlaceOfTheData) {
  for (const Case& c : cases(7000)) {
    SCOPED_TRACE(describe(c));
    Case tight = c;
    tight.hidden_layout = tight.weight_layout = tight.d_hidden_layout = tight.d_weight_layout = {};
    tight.skew = 0;
    tight.problem.dtype.targets = LOGITLESS_I64;
    Case loose = c;
    loose.hidden_layout = {7, 1};
    loose.weight_layout = {3, 5};
    loose.d_hidden_layout = {1, 7};
    loose.d_weight_layout = {9, 3};
    loose.skew = 5;
    loose.problem.dtype.targets = LOGITLESS_I32;
    if (is_device()) {  // other loads, copies and products
      expect_same_results(c, solve(loose), solve(tight), 2 * bounds_of(c));
    } else {
      EXPECT_STREQ(first_difference(solve(loose), solve(tight)), "");
    }
  }
}

LOGITLESS_TEST_ON(Invariance, engines());

}  // namespace
}  // namespace logitless_test
