// Exp logits that a forward pass saves give the gradients that come later, within any budget.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {
namespace {

class Saved : public EngineTest {
 protected:
  logitless::PlanInfo backward(const Case& c, size_t budget = LOGITLESS_FASTEST) const {
    logitless::Problem p = pass_problem(c, logitless::Pass::backward);
    p.max_workspace_bytes = budget;
    return logitless::Plan(context_, p).info();
  }

  // Gives a case the largest size that a plan says and that fits into these bytes; they are odd, so no plan
  // says them.
  void save_within(uint64_t bytes, Case* c) const {
    c->problem.saved_bytes = bytes | 1;
    c->problem.saved_bytes = refusal([&] { backward(*c); }).required_bytes;
    EXPECT_LE(c->problem.saved_bytes, bytes);
  }

  // Cases with upstream gradients that a row factor does not serve, and others.
  std::vector<Case> cases(PlainSize size) const {
    std::vector<Case> out;
    for (const logitless_dtype dtype : engine().kept_dtypes()) {
      Random random(11);
      Case c = plain_case(1, size, dtype);
      c.problem.reduction = LOGITLESS_REDUCTION_NONE;
      c.grad_loss = uniform_values(random, size.tokens, -1, 2, stats_dtype(c.problem));
      out.push_back(c);
      c.problem.has.entropy = c.problem.has.grad_entropy = 1;
      c.grad_entropy = uniform_values(random, size.tokens, -1, 1, stats_dtype(c.problem));
      out.push_back(c);
      c.problem.label_smoothing = 0.1;
      out.push_back(c);
      give_targets(random, &c, 5, -0.5, 1);
      out.push_back(c);
    }
    for (Case& each : out) each = saving(each);
    return out;
  }
};

// The logits are computed once. The reference and processors save nothing.
TEST_P(Saved, TheBackwardPassHasTwoMatmuls) {
  for (const Case& c : cases({70, 903, 24})) {
    SCOPED_TRACE(describe(c));
    const logitless::PlanInfo plan = backward(c);
    const auto size = static_cast<int64_t>(size_of(as_dtype(c.problem.dtype.hidden)));
    const bool saves = engine().keeps_exp_logits(c.problem);
    EXPECT_EQ(plan.cached_columns, saves ? 903 : 0);
    if (saves) {
      EXPECT_EQ(plan.cost_matmuls, 2);
      EXPECT_GE(static_cast<int64_t>(plan.saved_bytes), 70 * 903 * size);
    } else {
      EXPECT_EQ(plan.saved_bytes, 0U);
    }
    expect_truth(c);
  }
}

// Logits of the other columns are computed again. Saved bytes count in the budget.
TEST_P(Saved, PartOfTheColumns) {
  if (!is_device()) GTEST_SKIP() << "saves nothing";
  for (Case c : cases({is_slowed_down() ? 30 : 300, 2500, 16})) {
    SCOPED_TRACE(describe(c));
    const Expected expected(c);
    const uint64_t most = backward(c).saved_bytes;
    for (const uint64_t quarters : {1, 2, 3}) {
      save_within(most * quarters / 4, &c);
      const logitless::PlanInfo plan = backward(c);
      EXPECT_GT(plan.cached_columns, 0);
      EXPECT_LT(plan.cached_columns, c.problem.vocab);
      expected.check(engine(), solve(c, LOGITLESS_FASTEST));
      const size_t least = refusal([&] { backward(c, 1); }).required_bytes;
      const logitless::PlanInfo smallest = backward(c, least);
      EXPECT_EQ(smallest.workspace_bytes + smallest.saved_bytes, least);
      expected.check(engine(), solve(c, 2 * least));
    }
  }
}

// Where upstream gradients cancel, only the target has a gradient, up to 2^-30 of it. Rows without any have
// none.
TEST_P(Saved, UpstreamGradientsThatCancel) {
  Case c = saving(plain(5, {40, 903, 16}));
  c.problem.reduction = LOGITLESS_REDUCTION_NONE;
  c.problem.has.grad_lse = 1;
  for (int64_t row = 0; row < 40; ++row) {
    const double loss = row % 4 == 0 ? 0 : 1;
    c.grad_loss.push_back(loss);
    c.grad_lse.push_back(row % 4 == 1 ? -1 : row % 4 == 2 ? -1 + 0x1p-23 : 0);
  }
  expect_truth(c);
}

// With a softcap the gradient of the entropy needs logits, which saved exp logits do not give.
TEST_P(Saved, NothingForTheEntropyOfCappedLogits) {
  Case c = cases({40, 300, 16})[1];
  c.problem.softcap = 20;
  EXPECT_EQ(backward(c).saved_bytes, 0U);
  expect_truth(c);
  c.problem.has.grad_entropy = 0;
  c.grad_entropy.clear();
  expect_truth(c);
}

TEST_P(Saved, SizesThatDoNotFitAreRefused) {
  Case c = saving(plain(5, {40, 300, 16}));
  logitless::Problem p = pass_problem(c, logitless::Pass::backward);
  p.has.saved = 0;
  const logitless::Error without = refusal([&] { logitless::Plan(context_, p); });
  EXPECT_EQ(without.argument, "saved_bytes");
  p = pass_problem(c, logitless::Pass::forward_backward);
  p.has.saved = 1;
  const logitless::Error at_once = refusal([&] { logitless::Plan(context_, p); });
  EXPECT_EQ(at_once.argument, "saved");
  p = pass_problem(c, logitless::Pass::forward);
  const logitless::Error unknown = refusal([&] { logitless::Plan(context_, p); });
  EXPECT_EQ(unknown.argument, "saved_bytes");
}

// Both passes would round another size to whole columns, each to others.
TEST_P(Saved, SizesThatNoPlanSaysAreRefused) {
  Case c = saving(plain(5, {40, 300, 16}));
  const uint64_t said = backward(c).saved_bytes;
  for (const uint64_t given : {uint64_t{1}, std::max<uint64_t>(said, 2) - 1, said + 1, said + 64}) {
    c.problem.saved_bytes = given;
    const logitless::Problem forward = pass_problem(c, logitless::Pass::forward);
    const logitless::Error error = refusal([&] { logitless::Plan(context_, forward); });
    EXPECT_EQ(error.argument, "saved_bytes");
    EXPECT_EQ(error.got, std::to_string(given));
    EXPECT_NE(error.expected.find(std::to_string(error.required_bytes)), std::string::npos) << error.expected;
    EXPECT_LE(error.required_bytes, given);
    EXPECT_EQ(refusal([&] { backward(c); }).required_bytes, error.required_bytes);
    EXPECT_EQ(refusal([&] { context_.plans(forward); }).required_bytes, error.required_bytes);
    c.problem.saved_bytes = error.required_bytes;
    expect_truth(c);
  }
}

// A tile's logits span 160 nats, and most targets are far below the row's maximum. The softcap's slope is
// near 0 at both ends.
TEST_P(Saved, LogitsOfAnyRange) {
  for (const logitless_dtype dtype : engine().kept_dtypes()) {
    Case c = plain_case(12, {60, 903, 24}, dtype);
    c.problem.scale = 8;
    for (const double softcap : {0.0, 50.0}) {
      c.problem.softcap = softcap;
      c.problem.has.saved = 0;
      c.problem.saved_bytes = 0;
      c.mode = Mode::kForwardBackward;
      if (engine().keeps_exp_logits(c.problem)) {
        logitless::Problem p = pass_problem(c, logitless::Pass::forward_backward);
        p.max_workspace_bytes = LOGITLESS_FASTEST;
        EXPECT_EQ(logitless::Plan(context_, p).info().cached_columns, 903);
      }
      expect_truth(c, LOGITLESS_FASTEST);
      expect_truth(saving(c), LOGITLESS_FASTEST);
    }
  }
}

// A step of windows may be wider than the narrowest one beside saved exp logits. Losses have the bits of
// passes that save nothing.
TEST_P(Saved, BatchInvariantWithinABudget) {
  if (!is_device()) GTEST_SKIP() << "saves nothing";
  Case c = cases({12, 2500, 8})[0];
  c.problem.batch_invariant = 1;
  const size_t least = refusal([&] { backward(c, 1); }).required_bytes;
  const size_t most = least + backward(c).saved_bytes;
  for (size_t budget = least; budget <= most; budget += (most - least) / 8) {
    const logitless::PlanInfo plan = backward(c, budget);
    EXPECT_TRUE(plan.vocab_window > 0 || plan.cached_columns == 2500) << budget;
  }
  Case alone = c;
  alone.problem.has.saved = 0;
  alone.problem.saved_bytes = 0;
  save_within(backward(c).saved_bytes * 3 / 4, &c);
  const Outputs got = solve(c);
  EXPECT_TRUE(same_bits(got.lse, solve(alone).lse));
  Expected(c).check(engine(), got);
}

// Narrow windows of a copied weight begin where exp logits can be stored.
TEST_P(Saved, CopiedWindowsOfAForwardPass) {
  if (!is_device()) GTEST_SKIP() << "saves nothing";
  Case c = cases({40, 268, 7})[0];
  save_within(backward(c).saved_bytes * 3 / 4, &c);
  logitless::Problem forward = pass_problem(c, logitless::Pass::forward);
  forward.max_workspace_bytes = 1;
  const size_t least = refusal([&] { logitless::Plan(context_, forward); }).required_bytes;
  for (const size_t budget : {least, least + 1024, least + 2048, least + 4096}) {
    forward.max_workspace_bytes = budget;
    const logitless::PlanInfo plan = logitless::Plan(context_, forward).info();
    EXPECT_TRUE(plan.vocab_window % 8 == 0 || plan.vocab_window == 268) << plan.vocab_window;
  }
  expect_truth(c, std::max<size_t>(least, refusal([&] { backward(c, 1); }).required_bytes));
}

// Sums of the operands, which label smoothing needs, round these as products do.
TEST_P(Saved, LabelSmoothingOfOperandsInAnotherFormat) {
  Case c = saving(plain_case(3, {40, 64, 24}, LOGITLESS_F16));
  c.problem.compute_dtype = LOGITLESS_BF16;
  if (!is_device() || !engine().can_run(c.problem)) GTEST_SKIP() << "saves nothing";
  c.problem.label_smoothing = 0.5;
  save_within(1 << 20, &c);                       // of all columns, however long it takes
  c.weight.assign(c.weight.size(), 1 + 0x3p-10);  // all are rounded down
  c.hidden.assign(c.hidden.size(), 0.5 + 0x3p-11);
  EXPECT_EQ(backward(c).cached_columns, 64);
  expect_truth(c);
}

// A call plans for all upstream gradients that it may get.
TEST_P(Saved, FewerUpstreamGradientsNeedNoMoreMemory) {
  if (!is_device()) GTEST_SKIP() << "saves nothing";
  for (const Case& all : cases({2, 3000, 256})) {
    if (all.problem.has.grad_entropy == 0) continue;
    const size_t saved_bytes = backward(all).saved_bytes;
    const size_t least = refusal([&] { backward(all, 1); }).required_bytes;
    for (size_t more = 0; more < 200'000; more += 2048) {
      const size_t budget = std::max(least, saved_bytes + more);
      const logitless::PlanInfo plan = backward(all, budget);
      if (plan.cached_columns == 0) continue;
      Case fewer = all;
      fewer.problem.has.grad_entropy = 0;
      fewer.problem.saved_bytes = plan.saved_bytes;
      EXPECT_EQ(backward(fewer, budget).saved_bytes, plan.saved_bytes) << budget;
    }
  }
}

LOGITLESS_TEST_ON(Saved, engines());

}  // namespace
}  // namespace logitless_test
