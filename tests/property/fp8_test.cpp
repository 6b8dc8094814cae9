// Logits of operands in e4m3: loss and gradients are those of the rounded head with gradients that pass
// straight through the rounding, on every engine, in every plan and pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "engine_test.h"

namespace logitless_test {
namespace {

class Fp8 : public EngineTest {
 protected:
  static Case in_fp8(Case c) {
    c.problem.compute_dtype = LOGITLESS_FP8;
    return c;
  }
  std::vector<Case> random_fp8(uint64_t seed, uint64_t count, CaseLimits limits = {}) const {
    limits.allow_fp64 = false;
    std::vector<Case> out;
    for (; out.size() < count; ++seed) {
      Case c = in_fp8(random_case(seed, limits));
      c.problem.top_k = 0;
      if (c.mode == Mode::kForwardThenBackward && seed % 2 == 0) c = saving(c);
      if (engine().can_run(c.problem)) out.push_back(std::move(c));
    }
    return out;
  }
};

TEST_P(Fp8, AgreesWithTheRoundedHead) {
  for (const Case& c : random_fp8(0, seeds(150))) expect_truth(c);
}

TEST_P(Fp8, AgreesOverSeveralBlocks) {
  for (const Case& c :
       random_fp8(1'000'000, seeds(24), {.largest_dimension = 1500, .most_products = 1'500'000})) {
    expect_truth(c);
  }
}

// Depths around the length of a piece of e4m3 numbers, shapes of one, and operands of all formats.
TEST_P(Fp8, EdgesOfShapes) {
  for (const PlainSize size : {PlainSize{1, 1, 1}, {1, 300, 15}, {130, 1, 16}, {3, 193, 17}, {5, 7, 129}}) {
    for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
      const Case c = in_fp8(plain_case(2, size, dtype));
      expect_truth(c);
      expect_truth(saving(c));
    }
  }
}

// Budgets cut the weight into several windows of rounded rows.
TEST_P(Fp8, EveryBudgetSlow) {
  const bool fast = !engine().is_reference() && !is_slowed_down();
  std::vector<Case> cases;
  for (const bool is_invariant : {false, true}) {
    for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16}) {
      Case c = in_fp8(plain_case(1, fast ? PlainSize{300, 500, 40} : PlainSize{30, 210, 20}, dtype));
      c.problem.batch_invariant = is_invariant;
      if (is_invariant) {
        c.problem.softcap = 5;
        c.problem.has.entropy = c.problem.has.argmax = 1;
      }
      for (size_t row = 0; row < c.targets.size(); row += 3) c.targets[row] = c.problem.ignore_index;
      cases.push_back(c);
      c.problem.label_smoothing = 0.1;
      cases.push_back(c);
      c.mode = Mode::kForward;
      cases.push_back(c);
    }
  }
  cases.push_back(saving(cases[0]));
  for (const Case& c : cases) {
    const Expected expected(c);
    logitless::Problem p =
        pass_problem(c, c.mode == Mode::kForward           ? logitless::Pass::forward
                        : c.mode == Mode::kForwardBackward ? logitless::Pass::forward_backward
                                                           : logitless::Pass::backward);
    p.max_workspace_bytes = 1;
    const size_t least = refusal([&] { logitless::Plan(context_, p); }).required_bytes;
    p.max_workspace_bytes = LOGITLESS_FASTEST;
    const auto most = static_cast<double>(logitless::Plan(context_, p).info().workspace_bytes);
    for (auto budget = static_cast<double>(least); budget < 2 * most; budget *= 2) {
      SCOPED_TRACE(budget);
      try {
        expected.check(engine(), solve(c, static_cast<size_t>(std::ceil(budget))));
      } catch (const logitless::Error& error) {  // a pass of its own may need more
        EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
        EXPECT_EQ(c.mode, Mode::kForwardThenBackward);
      }
    }
  }
}

// Rows of very different sizes have scales of their own, and ignored rows none.
TEST_P(Fp8, RowsOfAllSizes) {
  Case c = in_fp8(plain_case(3, {40, 230, 24}, LOGITLESS_BF16));
  for (size_t i = 0; i < c.hidden.size(); ++i) c.hidden[i] *= std::ldexp(1, static_cast<int>(i / 24 % 9) - 4);
  for (size_t j = 0; j < c.weight.size(); ++j)
    c.weight[j] *= std::ldexp(1, 30 - static_cast<int>(j / 24 % 61));
  for (size_t k = 0; k < 24; ++k) {
    c.hidden[24 + k] = 0;
    c.weight[24 + k] = 0;
    c.hidden[2 * 24 + k] = NAN;
  }
  c.problem.softcap = 20;
  c.targets[2] = c.problem.ignore_index;
  expect_truth(c);
  c.mode = Mode::kForward;
  expect_truth(c);
}

// The target's logit of unrounded rows is 36, of rounded ones -88. A softcap keeps other logits in range,
// which are 60 below the former.
TEST_P(Fp8, TargetsFarFromTheirUnroundedLogits) {
  constexpr size_t kRows = 6, kColumns = 300, kDepth = 16;
  Case c = in_fp8(plain_case(6, {kRows, kColumns, kDepth}, LOGITLESS_BF16));
  for (const double factor : {64, 128, 256}) {
    for (size_t i = 0; i < c.hidden.size(); ++i) {
      const size_t k = i % kDepth;
      c.hidden[i] = k < 4 ? 1.0625 * factor : k < 7 ? 1.1875 * factor : 0;
    }
    for (size_t j = 0; j < c.weight.size(); ++j) {
      const size_t k = j % kDepth;
      c.weight[j] = k < 4 ? 1.0625 : k < 7 ? -1.1875 : 0;
    }
    c.problem.softcap = 30;
    expect_truth(c);
  }
}

TEST_P(Fp8, NoNumbersStayTheirRows) {
  for (const double bad : {NAN, INFINITY, -INFINITY}) {
    Case c = in_fp8(plain_case(4, {8, 300, 16}, LOGITLESS_BF16));
    c.problem.reduction = LOGITLESS_REDUCTION_NONE;
    c.hidden[2 * 16 + 5] = bad;
    const Outputs got = solve(c);
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(std::isfinite(got.nll[i]), i != 2) << bad << " " << i;
  }
}

// Loss and d_hidden are as far from those of operands as they are as docs/numerics.md says, at most.
TEST_P(Fp8, IsWithinItsBoundsOfOperandsAsTheyAre) {
  constexpr size_t kRows = 60, kColumns = 400, kDepth = 64;
  Case c = plain_case(5, {kRows, kColumns, kDepth}, LOGITLESS_BF16);
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  c.problem.dtype.d_hidden = LOGITLESS_F32;
  const Outputs as_they_are = solve(c), rounded = solve(in_fp8(c));
  const double of_gradients = bounds_of(c).d_hidden + bounds_of(in_fp8(c)).d_hidden;
  const Answer truth = materialise<double>(c);
  for (size_t i = 0; i < kRows; ++i) {
    const double* e = &c.hidden[i * kDepth];
    double error = 0;
    for (size_t j = 0; j < kColumns; ++j) {
      const double* w = &c.weight[j * kDepth];
      double products = 0, of_e = 0, of_w = 0, largest_e = 0, largest_w = 0;
      for (size_t k = 0; k < kDepth; ++k) {
        products += std::fabs(e[k] * w[k]);
        of_e += std::fabs(e[k]), of_w += std::fabs(w[k]);
        largest_e = std::fmax(largest_e, std::fabs(e[k]));
        largest_w = std::fmax(largest_w, std::fabs(w[k]));
      }
      const double rounding = (0x1p-3 + 0x1p-8) * products + 0x1p-17 * (largest_e * of_w + largest_w * of_e);
      // Products themselves round, those of e4m3 numbers on Hopper cut off what is below 2^-13.
      error = std::max(error, rounding + 33 * 0x1p-13 * std::ceil(kDepth / 32.0) * products);
    }
    EXPECT_NEAR(rounded.lse[i], as_they_are.lse[i], error);
    EXPECT_NEAR(rounded.nll[i], as_they_are.nll[i], 2 * error);
    EXPECT_NE(rounded.lse[i], as_they_are.lse[i]);
    for (size_t k = 0; k < kDepth; ++k) {
      double part = 0;  // sum_j p_ij |C_jk|
      for (size_t j = 0; j < kColumns; ++j) {
        part += std::exp(truth.logits[i * kColumns + j] - truth.lse[i]) * std::fabs(c.weight[j * kDepth + k]);
      }
      const size_t at = i * kDepth + k;
      EXPECT_NEAR(rounded.d_hidden[at], as_they_are.d_hidden[at],
                  std::expm1(2 * error) * part + of_gradients);
    }
  }
}

TEST_P(Fp8, Refusals) {
  const auto refused = [&](auto change) {
    logitless::Problem p =
        pass_problem(in_fp8(plain_case(6, {4, 30, 8}, LOGITLESS_BF16)), logitless::Pass::forward_backward);
    change(p);
    return refusal([&] { logitless::Plan(context_, p); }).argument;
  };
  using P = logitless::Problem&;
  EXPECT_EQ(refused([](P p) { p.gradient = LOGITLESS_SPARSIFIED; }), "compute_dtype");
  EXPECT_EQ(refused([](P p) { p.gradient = LOGITLESS_SPARSIFIED, p.screen = LOGITLESS_SCREEN_FP8; }),
            "compute_dtype");
  EXPECT_EQ(refused([](P p) { p.targets_per_row = 2; }), "targets_per_row");
  EXPECT_EQ(refused([](P p) { p.top_k = 2; }), "top_k");
  EXPECT_EQ(refused([](P p) {
              p.dtype.hidden = p.dtype.weight = p.dtype.bias = LOGITLESS_F64;
              p.dtype.d_hidden = p.dtype.d_weight = p.dtype.d_bias = LOGITLESS_F64;
            }),
            "compute_dtype");
}

LOGITLESS_TEST_ON(Fp8, engines());

}  // namespace
}  // namespace logitless_test
