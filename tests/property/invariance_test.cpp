// What must not change the results, or must change them in a known way, without any oracle's word for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "compare.h"

namespace logitless_test {
namespace {

class Invariance : public testing::TestWithParam<Engine> {
 protected:
  const Engine& engine() const { return GetParam(); }
  logitless::Context context_ = make_context(GetParam());
};

// Random problems this engine can run.
std::vector<Case> random_cases(const Engine& engine, uint64_t first_seed, int count,
                               const std::function<void(Case*)>& change = {}) {
  std::vector<Case> cases;
  for (uint64_t seed = first_seed; static_cast<int>(cases.size()) < count; ++seed) {
    Case c = random_case(seed, {.allow_fp64 = false});
    if (c.mode == Mode::kForward || !engine.can_run(c.problem)) continue;
    if (change) change(&c);
    cases.push_back(std::move(c));
  }
  return cases;
}

// Adding one number to all logits changes no loss but z-loss, and no gradient.
TEST_P(Invariance, ShiftOfAllLogits) {
  const auto plain = [](Case* c) {
    c->problem.z_loss = c->problem.softcap = 0;
    if (c->problem.has.bias == 0) {
      c->problem.has.bias = 1;
      c->bias.assign(static_cast<size_t>(c->problem.vocab), 0);
    }
    c->problem.dtype.bias = LOGITLESS_F32;
    for (double& b : c->bias) b = std::round(b * 1024) / 1024;  // so that adding 3 is exact
  };
  for (const Case& c : random_cases(engine(), 1000, 20, plain)) {
    Case shifted = c;
    for (double& b : shifted.bias) b += 3;
    const Expected expected(c);
    const Bounds bounds = expected.bounds_of(GetParam()) + Expected(shifted).bounds_of(GetParam());
    Outputs found = solve(context_, shifted);
    for (std::vector<double>* logits : {&found.target_logit, &found.max_logit, &found.mean_logit}) {
      for (size_t i = 0; i < logits->size(); ++i) {
        const bool ignored = expected.truth().argmax[i] < 0;
        if (!ignored) (*logits)[i] -= 3 / c.temperature_of(static_cast<int64_t>(i));
      }
    }
    expect_same_results(c, found, solve(context_, c), bounds);
  }
}

// sum_j dz_ij is 0 but for the gradients that come through lse or the target's logit itself; the gradient of
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
  for (const Case& c : random_cases(engine(), 2000, 20, with_bias_gradient)) {
    SCOPED_TRACE(describe(c));
    const Outputs got = solve(context_, c);
    double through_logits = 0;
    for (const std::vector<double>* upstream : {&c.grad_lse, &c.grad_target_logit}) {
      for (size_t i = 0; i < upstream->size(); ++i) {
        if (c.target_of(static_cast<int64_t>(i)) != c.problem.ignore_index)
          through_logits += (*upstream)[i] / c.temperature_of(static_cast<int64_t>(i));
      }
    }
    const double sum = std::accumulate(got.d_bias.begin(), got.d_bias.end(), 0.0);
    double rounding = 0;
    for (double d : got.d_bias) rounding += std::fabs(d) * 0x1p-24;
    const Expected expected(c);
    if (std::isnan(expected.truth().loss[0]) && c.problem.reduction == LOGITLESS_REDUCTION_MEAN) continue;
    EXPECT_NEAR(sum, through_logits,
                static_cast<double>(c.problem.vocab) * expected.bounds_of(GetParam()).d_bias + rounding);
  }
}

// A power of two times the upstream gradient is exactly that times the gradients.
TEST_P(Invariance, LinearInTheUpstreamGradient) {
  const auto float_gradients = [](Case* c) {
    logitless::Problem& p = c->problem;
    p.dtype.d_hidden = p.dtype.d_classifier = p.dtype.d_bias = LOGITLESS_F32;
    p.accumulate.d_hidden = p.accumulate.d_classifier = p.accumulate.d_bias = 0;
    const bool per_row = p.reduction == LOGITLESS_REDUCTION_NONE;
    if (c->grad_loss.empty()) c->grad_loss.assign(per_row ? static_cast<size_t>(p.tokens) : 1, 0.75);
  };
  for (const Case& c : random_cases(engine(), 3000, 20, float_gradients)) {
    SCOPED_TRACE(describe(c));
    Case larger = c;
    for (auto* upstream : {&larger.grad_loss, &larger.grad_nll, &larger.grad_lse, &larger.grad_entropy,
                           &larger.grad_target_logit}) {
      for (double& value : *upstream) value *= 4;
    }
    Outputs once = solve(context_, c);
    for (auto* gradient : {&once.d_hidden, &once.d_classifier, &once.d_bias}) {
      for (double& value : *gradient) value *= 4;
    }
    EXPECT_STREQ(first_difference(solve(context_, larger), once), "");
  }
}

std::vector<double> permuted(const std::vector<double>& rows, const std::vector<size_t>& order) {
  if (rows.empty()) return {};
  const size_t width = rows.size() / order.size();
  std::vector<double> out;
  for (size_t row : order) {
    out.insert(out.end(), rows.begin() + static_cast<std::ptrdiff_t>(row * width),
               rows.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
  }
  return out;
}

TEST_P(Invariance, PermutationOfTheRows) {
  const auto unshifted = [](Case* c) { c->problem.shift = 0; };
  for (const Case& c : random_cases(engine(), 4000, 20, unshifted)) {
    Random random(c.seed);
    std::vector<size_t> order(static_cast<size_t>(c.problem.tokens));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    Case other = c;
    for (size_t i = 0; i < order.size(); ++i) other.targets[i] = c.targets[order[i]];
    const bool per_row = c.problem.reduction == LOGITLESS_REDUCTION_NONE;
    const auto reorder = [&](std::vector<double>* rows) { *rows = permuted(*rows, order); };
    for (auto* rows :
         {&other.hidden, &other.token_weight, &other.temperature, &other.grad_nll, &other.grad_lse,
          &other.grad_entropy, &other.grad_target_logit, &other.d_hidden_start}) {
      reorder(rows);
    }
    if (per_row) reorder(&other.grad_loss);
    Outputs expected = solve(context_, c);
    for (auto* rows : {&expected.nll, &expected.entropy, &expected.target_logit, &expected.max_logit,
                       &expected.mean_logit, &expected.log_sum_sq_probs, &expected.d_hidden}) {
      reorder(rows);
    }
    if (per_row) reorder(&expected.loss);
    expect_same_results(c, solve(context_, other), expected, 2 * Expected(c).bounds_of(GetParam()));
  }
}

// One run of both passes, or one of each.
TEST_P(Invariance, ForwardThenBackwardIsForwardBackward) {
  const auto no_further_upstream = [](Case* c) {
    logitless::Problem& p = c->problem;
    p.has.grad_nll = p.has.grad_lse = p.has.grad_entropy = p.has.grad_target_logit = 0;
    if (p.reduction == LOGITLESS_REDUCTION_NONE && c->grad_loss.empty()) {
      c->grad_loss.assign(static_cast<size_t>(p.tokens), 1);
    }
  };
  for (Case c : random_cases(engine(), 5000, 30, no_further_upstream)) {
    c.mode = Mode::kForwardBackward;
    const Outputs at_once = solve(context_, c);
    c.mode = Mode::kForwardThenBackward;
    expect_same_results(c, solve(context_, c), at_once, 2 * Expected(c).bounds_of(GetParam()));
  }
}

// A gradient is the same whether or not others are computed beside it.
TEST_P(Invariance, FrozenSides) {
  for (const Case& c : random_cases(engine(), 6000, 20)) {
    const Outputs all = solve(context_, c);
    const Bounds bounds = 2 * Expected(c).bounds_of(GetParam());
    for (int side = 0; side < 3; ++side) {
      Case one = c;
      logitless::Problem& p = one.problem;
      if (side != 0) p.has.d_hidden = p.accumulate.d_hidden = 0;
      if (side != 1) p.has.d_classifier = p.accumulate.d_classifier = 0;
      if (side != 2) p.has.d_bias = p.accumulate.d_bias = 0;
      if (!one.wants_gradients()) continue;
      Outputs expected = all;
      if (side != 0) expected.d_hidden.clear();
      if (side != 1) expected.d_classifier.clear();
      if (side != 2) expected.d_bias.clear();
      expect_same_results(one, solve(context_, one), expected, bounds);
    }
  }
}

// Strides, alignment and the targets' width change no bit; on a device, nothing but rounding.
TEST_P(Invariance, WhereTheDataLies) {
  for (const Case& c : random_cases(engine(), 7000, 20)) {
    SCOPED_TRACE(describe(c));
    Case tight = c;
    tight.hidden_layout = tight.classifier_layout = tight.d_hidden_layout = tight.d_classifier_layout = {};
    tight.skew = 0;
    tight.problem.dtype.targets = LOGITLESS_I64;
    Case loose = c;
    loose.hidden_layout = {7, 1};
    loose.classifier_layout = {3, 5};
    loose.d_hidden_layout = {1, 7};
    loose.d_classifier_layout = {9, 3};
    loose.skew = 5;
    loose.problem.dtype.targets = LOGITLESS_I32;
    if (engine().is_device()) {  // other loads, copies and products
      expect_same_results(c, solve(context_, loose), solve(context_, tight),
                          2 * Expected(c).bounds_of(engine()));
    } else {
      EXPECT_STREQ(first_difference(solve(context_, loose), solve(context_, tight)), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Invariance, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
