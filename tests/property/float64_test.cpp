// Problems in float64, on every engine that has it: within the error of double arithmetic, whatever the
// options, the budget and the values are.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>
#include <string>

#include "compare.h"

namespace logitless_test {
namespace {

class Float64 : public testing::TestWithParam<Engine> {
 protected:
  const Engine& engine() const { return GetParam(); }
  logitless::Context context_ = make_context(GetParam());
};

std::vector<Engine> engines_with_float64() {
  std::vector<Engine> found;
  for (const Engine& engine : engines()) {
    if (engine.has_float64()) found.push_back(engine);
  }
  return found;
}

TEST_P(Float64, AgreesWithTheMaterialisedComputation) {
  for (uint64_t seed = 0; seed < seeds(150); ++seed) {
    const Case c = random_case(seed, {.only_fp64 = true});
    Expected(c).check(engine(), solve(context_, c));
  }
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
      expected.check(engine(), solve(context_, c));
    }
  }
}

// The reference has the same bits for every budget. Plans of a device have sums of their own, all as precise.
TEST_P(Float64, EveryBudget) {
  std::vector<Case> cases = {plain_case(
      1, engine().is_reference() ? PlainSize{20, 90, 5} : PlainSize{600, 1100, 20}, LOGITLESS_F64)};
  for (uint64_t seed = 300; seed < 300 + seeds(20); ++seed)
    cases.push_back(random_case(seed, {.only_fp64 = true}));
  for (const Case& c : cases) {
    SCOPED_TRACE(describe(c));
    const Expected expected(c);
    const Outputs most = solve(context_, c);
    const logitless::Pass pass =
        c.mode == Mode::kForward ? logitless::Pass::forward : logitless::Pass::forward_backward;
    for (const logitless::PlanInfo& plan : context_.plans(pass_problem(c, pass))) {
      if (plan.workspace_bytes == 0) continue;
      try {
        const Outputs got = solve(context_, c, plan.workspace_bytes);
        SCOPED_TRACE(plan.config);
        expected.check(engine(), got);
        if (engine().is_reference()) {
          EXPECT_STREQ(first_difference(got, most), "");
        }
      } catch (const logitless::Error& error) {  // a pass of its own may need more
        EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
      }
    }
  }
}

bool same_kind(double x, double y) {
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  return std::isinf(x) || std::isinf(y) ? x == y : true;
}

// What is not finite comes out as it does of the reference, and leaves the rest as precise as before.
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
      [&](Case* c) { c->classifier[11] = infinity; },
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
        const Outputs got = solve(context_, c), expected = solve(reference, c);
        EXPECT_EQ(got.argmax, expected.argmax);
        EXPECT_EQ(got.correct_count, expected.correct_count);
        for (const auto member : {&Outputs::max, &Outputs::sum_exp, &Outputs::target_logit, &Outputs::loss,
                                  &Outputs::nll, &Outputs::lse, &Outputs::entropy, &Outputs::d_hidden,
                                  &Outputs::d_classifier, &Outputs::d_bias}) {
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

// A common offset of the logits changes no gradient but by the rounding of the logits themselves; a gradient
// of the entropy, too, is one of differences.
TEST_P(Float64, CommonOffset) {
  constexpr double kOffset = 0x1p20;
  Case c = plain_case(8, {12, 130, 6}, LOGITLESS_F64);
  c.mode = Mode::kForwardThenBackward;
  c.problem.has.entropy = c.problem.has.grad_entropy = 1;
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  c.grad_entropy.assign(12, 1.5);
  for (double& b : c.bias) b = std::round(b * 1024) / 1024;  // so that the offset is added exactly
  for (double& x : c.hidden) x = std::round(x * 1024) / 1024;
  for (double& x : c.classifier) x = std::round(x * 1024) / 1024;
  const Outputs plain = solve(context_, c);
  for (double& b : c.bias) b += kOffset;
  const Outputs shifted = solve(context_, c);
  // A rounding there is of 2^-33: one of lse, and 1.5 times a few of the entropy, in each of 12 rows whose
  // numbers are at most 4.
  const double error = 0x1p-33 * 8 * 12 * 4;
  EXPECT_TRUE(close("d_hidden", shifted.d_hidden, plain.d_hidden, error, LOGITLESS_F64));
  EXPECT_TRUE(close("d_classifier", shifted.d_classifier, plain.d_classifier, error, LOGITLESS_F64));
  EXPECT_TRUE(close("d_bias", shifted.d_bias, plain.d_bias, error, LOGITLESS_F64));
}

TEST_P(Float64, ThinnedGradientsAreRefusedByNameOnADevice) {
  if (!engine().is_device()) GTEST_SKIP() << "the reference thins them";
  Case c = plain_case(1, {3, 5, 2}, LOGITLESS_F64);
  c.problem.gradient = LOGITLESS_ALWAYS_THINNED;
  try {
    solve(context_, c);
    ADD_FAILURE() << "not refused";
  } catch (const logitless::Error& error) {
    EXPECT_EQ(error.status(), LOGITLESS_UNSUPPORTED);
    EXPECT_NE(std::string(error.what()).find("gradient must be exact with float64"), std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Float64, testing::ValuesIn(engines_with_float64()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
