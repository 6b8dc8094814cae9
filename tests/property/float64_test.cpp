// Problems in float64, on every engine that has it, are within the error of double arithmetic, whatever the
// options and the values are.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "engine_test.h"

namespace logitless_test {
namespace {

class Float64 : public EngineTest {};

std::vector<Engine> engines_with_float64() {
  std::vector<Engine> out;
  for (const Engine& engine : engines()) {
    if (engine.has_float64()) out.push_back(engine);
  }
  return out;
}

TEST_P(Float64, AgreesWithTheMaterialisedComputation) {
  for (const Case& c : random_cases(0, seeds(150), {.only_fp64 = true})) expect_truth(c);
}

// More rows, columns and terms than a tile, a strip and a block of the kernels, in whole ones and not.
TEST_P(Float64, AgreesOverSeveralBlocks) {
  if (!engine().is_device()) GTEST_SKIP() << "the reference has no blocks";
  const PlainSize sizes[] = {{64, 64, 16},   {65, 129, 17}, {1030, 70, 9},
                             {130, 2100, 5}, {3, 4100, 40}, {1100, 2050, 3}};
  for (const PlainSize& size : sizes) {
    Case c = plain_case(static_cast<uint64_t>(size.vocab), size, LOGITLESS_F64);
    c.problem.has.entropy = c.problem.has.argmax = 1;
    for (size_t i = 0; i < c.targets.size(); i += 5) c.targets[i] = c.problem.ignore_index;
    const Expected expected(c);
    for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
      c.mode = mode;
      expected.check(engine(), solve(c));
    }
  }
}

bool same_kind(double x, double y) {
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  return std::isinf(x) || std::isinf(y) ? x == y : true;
}

// Values that are not finite give what the reference gives, and leave the rest as precise as before.
TEST_P(Float64, SpecialValuesAsTheReference) {
  const logitless::Context reference = make_context({"reference", ""});
  const double infinity = INFINITY;
  const std::function<void(Case*)> changes[] = {
      [&](Case* c) { c->bias[3] = -infinity; },  // no target
      [&](Case* c) { c->bias[static_cast<size_t>(c->targets[1])] = -infinity; },
      [&](Case* c) { c->bias[70] = infinity; },
      [&](Case* c) { c->bias[70] = NAN; },
      [&](Case* c) { c->bias.assign(c->bias.size(), -infinity); },
      [&](Case* c) { c->hidden[7] = NAN; },
      [&](Case* c) { c->hidden[7] = infinity; },
      [&](Case* c) { c->weight[11] = infinity; },
      [&](Case* c) { c->targets.assign(c->targets.size(), c->problem.ignore_index); },
  };
  for (size_t change = 0; change < std::size(changes); ++change) {
    for (double softcap : {0.0, 4.0}) {
      for (Mode mode : {Mode::kForwardBackward, Mode::kForwardThenBackward}) {
        SCOPED_TRACE(testing::Message() << "change " << change << ", softcap " << softcap);
        Case c = plain_case(6, {9, 150, 4}, LOGITLESS_F64);
        c.mode = mode;
        c.targets = {1, 2, 4, 5, 6, 71, 149, 0, 64};
        c.problem.has.entropy = c.problem.has.argmax = 1;
        c.problem.softcap = softcap;
        c.problem.reduction = LOGITLESS_REDUCTION_NONE;
        c.grad_loss.assign(9, 0.5);
        changes[change](&c);
        const Outputs got = solve(c), expected = logitless_test::solve(reference, c);
        EXPECT_EQ(got.argmax, expected.argmax);
        EXPECT_EQ(got.correct_count, expected.correct_count);
        for (const auto member :
             {&Outputs::max, &Outputs::sum_exp, &Outputs::target_logit, &Outputs::loss, &Outputs::nll,
              &Outputs::lse, &Outputs::entropy, &Outputs::d_hidden, &Outputs::d_weight, &Outputs::d_bias}) {
          const std::vector<double>&x = got.*member, &y = expected.*member;
          ASSERT_EQ(x.size(), y.size());
          for (size_t i = 0; i < x.size(); ++i) {
            ASSERT_TRUE(same_kind(x[i], y[i])) << "[" << i << "] " << x[i] << " instead of " << y[i];
            if (std::isfinite(y[i])) {
              ASSERT_NEAR(x[i], y[i], 1e-13 * (1 + std::fabs(y[i])));
            }
          }
        }
      }
    }
  }
}

// A common offset of the logits changes no gradient but by the rounding of the logits themselves. A gradient
// of the entropy is also one of differences.
TEST_P(Float64, CommonOffset) {
  constexpr double kOffset = 0x1p20;
  Case c = plain_case(8, {12, 130, 6}, LOGITLESS_F64);
  c.mode = Mode::kForwardThenBackward;
  c.problem.has.entropy = c.problem.has.grad_entropy = 1;
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  c.grad_entropy.assign(12, 1.5);
  for (auto* values : {&c.bias, &c.hidden, &c.weight}) {
    for (double& x : *values) x = std::round(x * 1024) / 1024;  // so that the offset is added exactly
  }
  const Outputs plain = solve(c);
  for (double& b : c.bias) b += kOffset;
  const Outputs shifted = solve(c);
  // A rounding there is of 2^-33. Each of 12 rows has one of lse, and 1.5 times a few of the entropy, and
  // numbers of at most 4.
  const double error = 0x1p-33 * 8 * 12 * 4;
  expect_gradients(shifted, plain, {.d_hidden = error, .d_weight = error, .d_bias = error}, LOGITLESS_F64);
}

TEST_P(Float64, SparsifiedGradientsAreRefusedOnADevice) {
  if (!engine().is_device()) GTEST_SKIP() << "the reference sparsifies them";
  Case c = plain_case(1, {3, 5, 2}, LOGITLESS_F64);
  c.problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
  const logitless::Error error = refusal([&] { solve(c); });
  EXPECT_EQ(error.status(), LOGITLESS_UNSUPPORTED);
  EXPECT_NE(std::string(error.what()).find("gradient must be exact with float64"), std::string::npos)
      << error.what();
}

LOGITLESS_TEST_ON(Float64, engines_with_float64());

}  // namespace
}  // namespace logitless_test
