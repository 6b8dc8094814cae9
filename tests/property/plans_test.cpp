// Every plan and every budget gives the same results, and no budget is exceeded.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <string_view>

#include "compare.h"

namespace logitless_test {
namespace {

class Plans : public testing::TestWithParam<Engine> {
 protected:
  logitless::Context context_ = make_context(GetParam());

  // The smallest budget, as the refusal of one byte names it.
  size_t smallest_budget(logitless::Problem problem) const {
    problem.max_workspace_bytes = 1;
    try {
      const logitless::Plan plan(context_, problem);
    } catch (const logitless::Error& error) {
      EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL);
      EXPECT_EQ(error.argument, "max_workspace_bytes");
      EXPECT_EQ(error.got, "1 byte");
      return error.required_bytes;
    }
    ADD_FAILURE() << "a budget of one byte was not refused";
    return 0;
  }

  // All plans that are listed agree with the oracle.
  void check_plans(const Case& c) const {
    SCOPED_TRACE(describe(c));
    const Expected expected(c);
    std::set<size_t> budgets{0, smallest_budget(pass_problem(c, logitless::Pass::forward_backward))};
    for (const logitless::PlanInfo& plan :
         context_.plans(pass_problem(c, logitless::Pass::forward_backward))) {
      for (size_t less : {0, 1}) budgets.insert(plan.workspace_bytes - less);
    }
    for (size_t budget : budgets) {
      SCOPED_TRACE(budget);
      try {
        expected.check(GetParam(), solve(context_, c, budget));
      } catch (const logitless::Error& error) {
        EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
      }
    }
  }

  logitless::PlanInfo fastest(logitless::Problem problem) const {
    problem.max_workspace_bytes = LOGITLESS_FASTEST;
    return logitless::Plan(context_, problem).info();
  }

  logitless_pass pass_of(const Case& c) const {
    return c.mode == Mode::kForward ? LOGITLESS_FORWARD : LOGITLESS_FORWARD_BACKWARD;
  }
};

std::vector<Case> cases_for(const Engine& engine) {
  std::vector<Case> out;
  for (uint64_t seed = 300; out.size() < seeds(25); ++seed) {
    Case c = random_case(seed, {.allow_fp64 = engine.has_float64()});
    if (c.mode == Mode::kForwardThenBackward || !engine.can_run(c.problem)) continue;
    out.push_back(std::move(c));
  }
  const bool fast = !engine.is_reference();
  for (logitless_dtype dtype : {engine.plain_dtype(), LOGITLESS_BF16, LOGITLESS_F16}) {
    out.push_back(plain_case(
        1, fast ? PlainSize{520, is_slowed_down() ? 300 : 1100, 40} : PlainSize{30, 100, 20}, dtype));
  }
  return out;
}

TEST_P(Plans, EveryBudgetAgreesSlow) {
  for (const Case& c : cases_for(GetParam())) {
    SCOPED_TRACE(describe(c));
    const logitless::Problem problem = pass_problem(c, static_cast<logitless::Pass>(pass_of(c)));
    const Expected expected(c);
    std::set<size_t> budgets;
    for (const logitless::PlanInfo& plan : context_.plans(problem)) {
      if (plan.workspace_bytes > 0) budgets.insert(plan.workspace_bytes);
    }
    const size_t smallest = smallest_budget(problem);
    const size_t most = fastest(problem).workspace_bytes;
    for (double budget = static_cast<double>(smallest); budget < static_cast<double>(most); budget *= 1.7) {
      budgets.insert(static_cast<size_t>(std::ceil(budget)));
    }
    EXPECT_GE(most, smallest);
    size_t before = 0;
    for (size_t budget : budgets) {
      SCOPED_TRACE(budget);
      const Outputs got = solve(context_, c, budget);
      EXPECT_GE(got.workspace_bytes, smallest);
      EXPECT_LE(got.workspace_bytes, budget);
      before = got.workspace_bytes;
      expected.check(GetParam(), got);
    }
    EXPECT_LE(before, most);
  }
}

// A gradient in a dtype that no matrix product writes passes through a window of the workspace; the
// vocabulary is wider than any such window.
TEST_P(Plans, GradientsOfAThirdDtypeOverAWideVocabularySlow) {
  Case c = plain_case(2, {24, is_slowed_down() ? 3000 : 30000, 8}, GetParam().plain_dtype());
  for (logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
    c.problem.dtype.d_classifier = dtype;
    check_plans(c);
  }
}

// On a host the bits of a result do not depend on the budget, whose smallest plans go over the classifier
// once more instead of keeping an fp32 sum beside a 16-bit d_classifier.
TEST_P(Plans, SameBitsForAnyBudgetSlow) {
  if (GetParam().is_device()) GTEST_SKIP() << "plans round differently there";
  const bool fast = !GetParam().is_reference() && !is_slowed_down();
  std::vector<Case> cases(
      4, plain_case(4, fast ? PlainSize{1300, 1000, 40} : PlainSize{600, 60, 8}, LOGITLESS_BF16));
  cases[1].problem.has.d_hidden = 0;
  cases[2].problem.softcap = 5;
  cases[2].problem.label_smoothing = 0.1;
  cases[2].problem.dtype.d_classifier = LOGITLESS_F16;
  cases[3].mode = Mode::kForwardThenBackward;
  for (size_t i = 0; i < 600; i += 7) cases[3].targets[i] = cases[3].problem.ignore_index;
  for (const Case& c : cases) {
    const auto pass =
        c.mode == Mode::kForwardThenBackward ? logitless::Pass::backward : logitless::Pass::forward_backward;
    const logitless::Problem problem = pass_problem(c, pass);
    Outputs known;
    if (pass == logitless::Pass::backward)
      known = run_pass(context_, pass_problem(c, logitless::Pass::forward), c);
    logitless::Problem unlimited = problem;
    unlimited.max_workspace_bytes = LOGITLESS_FASTEST;
    const Outputs most = run_pass(context_, unlimited, c, &known);
    EXPECT_STREQ(first_difference(run_pass(context_, problem, c, &known), most), "") << describe(c);
    for (auto budget = static_cast<double>(smallest_budget(problem));
         budget < static_cast<double>(most.workspace_bytes); budget *= 1.4) {
      logitless::Problem tight = problem;
      tight.max_workspace_bytes = static_cast<size_t>(std::ceil(budget));
      EXPECT_STREQ(first_difference(run_pass(context_, tight, c, &known), most), "")
          << budget << ", " << describe(c);
    }
  }
}

// With rows of the classifier as wide as there are tokens, exps are kept where d_classifier will be, if rows
// lie without gaps between them; and elsewhere they are computed again, bit for bit.
TEST_P(Plans, SameBitsWhereverTheClassifiersGradientLiesSlow) {
  if (GetParam().is_device()) GTEST_SKIP() << "a product's algorithm there depends on alignment";
  const int64_t vocab = is_slowed_down() ? 500 : 1000;
  for (logitless_dtype dtype : {GetParam().plain_dtype(), LOGITLESS_BF16, LOGITLESS_F16}) {
    for (int64_t hidden : {95, 96, 192}) {
      Case c = plain_case(8, {96, vocab, hidden}, dtype);
      c.problem.label_smoothing = hidden == 96 ? 0.1 : 0;
      SCOPED_TRACE(describe(c));
      const Expected expected(c);
      const Outputs dense = solve(context_, c);
      expected.check(GetParam(), dense);
      for (const Layout& layout : {Layout{7, 0}, Layout{0, 1}, Layout{0, 2}}) {
        c.d_classifier_layout = layout;
        EXPECT_STREQ(first_difference(solve(context_, c), dense), "")
            << layout.padding << ", " << layout.skew;
      }
    }
  }
}

// Nothing is left of an [N, V] matrix in the workspace then.
TEST_P(Plans, ExpsAreKeptWhereTheClassifiersGradientWillBe) {
  if (GetParam().is_device() || GetParam().is_reference()) GTEST_SKIP() << "of the cpu's plans";
  logitless::Problem problem;
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = 1000;
  problem.vocab = 448 * 224;  // whole blocks
  problem.hidden = 1024;
  problem.has.d_hidden = problem.has.d_classifier = 1;
  problem.max_workspace_bytes = LOGITLESS_FASTEST;
  const size_t exps = size_t{1000} * 448 * 224 * sizeof(float);
  const logitless::Context context = make_context(GetParam(), 2);
  const logitless::PlanInfo wide = logitless::Plan(context, problem).info();
  EXPECT_LT(wide.cost_f, 3.1);
  EXPECT_LT(wide.workspace_bytes, exps / 4);
  // A gradient that is added to is not free to write, and one of fewer columns has no room.
  problem.accumulate.d_classifier = 1;
  EXPECT_GT(logitless::Plan(context, problem).info().workspace_bytes, exps);
  problem.accumulate.d_classifier = 0;
  problem.hidden = 900;
  EXPECT_GT(logitless::Plan(context, problem).info().workspace_bytes, exps);
}

// The head of a model of 8 billion parameters, planned alone.
TEST_P(Plans, ALargeHeadFitsInLittle) {
  if (GetParam().is_device() || GetParam().is_reference()) GTEST_SKIP() << "of the cpu's plans";
  logitless::Problem problem;
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = 8192;
  problem.vocab = 151936;
  problem.hidden = 4096;
  problem.has.d_hidden = problem.has.d_classifier = 1;
  problem.max_workspace_bytes = size_t{64} << 20;
  for (int32_t dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
    problem.dtype.hidden = problem.dtype.classifier = problem.dtype.d_hidden = problem.dtype.d_classifier =
        dtype;
    EXPECT_NO_THROW(logitless::Plan(make_context(GetParam(), 2), problem)) << dtype;
  }
}

// Chunks of tokens of which few or none have a row to compute, with and without gradients to add to.
TEST_P(Plans, ChunksOfIgnoredRowsSlow) {
  const bool fast = !GetParam().is_reference() && !is_slowed_down();
  const Case plain = plain_case(3, {fast ? 1100 : 110, 130, 16}, GetParam().plain_dtype());
  const int64_t n = plain.problem.tokens, v = plain.problem.vocab, d = plain.problem.hidden;
  for (int64_t valid : {int64_t{0}, int64_t{1}, n / 4, n - 1}) {
    for (const bool adds : {false, true}) {
      Case c = plain;
      c.problem.reduction = LOGITLESS_REDUCTION_SUM;
      // The valid rows are the last ones, so that they move where ignored rows are left out.
      for (int64_t i = 0; i < n - valid; ++i) c.targets[static_cast<size_t>(i)] = c.problem.ignore_index;
      if (adds) {
        Random random(4);
        logitless::Problem& p = c.problem;
        p.accumulate.d_hidden = p.accumulate.d_classifier = p.accumulate.d_bias = 1;
        p.dtype.d_hidden = p.dtype.d_classifier = p.dtype.d_bias = LOGITLESS_F32;
        c.d_hidden_start = normal_values(random, n * d, 1, LOGITLESS_F32);
        c.d_classifier_start = normal_values(random, v * d, 1, LOGITLESS_F32);
        c.d_bias_start = normal_values(random, v, 1, LOGITLESS_F32);
      }
      check_plans(c);
    }
  }
}

TEST_P(Plans, TheSmallestBudgetIsNamedAndTightSlow) {
  for (const Case& c : cases_for(GetParam())) {
    SCOPED_TRACE(describe(c));
    logitless::Problem problem = pass_problem(c, static_cast<logitless::Pass>(pass_of(c)));
    const size_t smallest = smallest_budget(problem);
    problem.max_workspace_bytes = smallest;
    EXPECT_EQ(logitless::Plan(context_, problem).info().workspace_bytes, smallest);
    problem.max_workspace_bytes = smallest - 1;
    EXPECT_THROW(logitless::Plan(context_, problem), logitless::Error);
  }
}

// What another plan may be faster by: a rounding of d_classifier, one a chunk of tokens, must gain 4%.
double handicap_of(const logitless::Problem& problem, const logitless::PlanInfo& plan) {
  if (std::string_view(plan.config).find("dC rounded") == std::string_view::npos) return 1;
  const int64_t chunk = std::max<int64_t>(plan.token_chunk, 1);
  return 1 + 0.04 * static_cast<double>((std::max<int64_t>(problem.tokens, 1) - 1) / chunk);
}

// A list of plans: the chosen one is in it, and is the fastest.
TEST_P(Plans, TheFastestIsChosen) {
  for (const Case& c : cases_for(GetParam())) {
    logitless::Problem problem = pass_problem(c, static_cast<logitless::Pass>(pass_of(c)));
    problem.max_workspace_bytes = LOGITLESS_FASTEST;
    const logitless::PlanInfo chosen = logitless::Plan(context_, problem).info();
    EXPECT_EQ(std::string(chosen.backend), GetParam().backend);
    EXPECT_GT(chosen.cost_f, 0);
    bool listed = false;
    for (const logitless::PlanInfo& plan : context_.plans(problem)) {
      EXPECT_LE(chosen.predicted_seconds, plan.predicted_seconds * handicap_of(problem, plan));
      listed = listed || (plan.kind == chosen.kind && plan.workspace_bytes == chosen.workspace_bytes);
    }
    EXPECT_TRUE(listed) << describe(c);
  }
}

// By default: of the plans that are listed none is smaller and as good, within 3% of the fastest.
TEST_P(Plans, TheDefaultIsSmallAndNearlyTheFastest) {
  for (const Case& c : cases_for(GetParam())) {
    SCOPED_TRACE(describe(c));
    const logitless::Problem problem = pass_problem(c, static_cast<logitless::Pass>(pass_of(c)));
    const logitless::PlanInfo chosen = logitless::Plan(context_, problem).info(), fast = fastest(problem);
    EXPECT_NE(std::string_view(chosen.choice).find('%'), std::string_view::npos) << chosen.choice;
    EXPECT_STREQ(fast.choice, "the fastest");
    EXPECT_LE(chosen.workspace_bytes, fast.workspace_bytes);
    EXPECT_LE(chosen.predicted_seconds, 1.06 * fast.predicted_seconds);
    bool listed = false;
    for (const logitless::PlanInfo& plan : context_.plans(problem)) {
      listed = listed || (plan.kind == chosen.kind && plan.workspace_bytes == chosen.workspace_bytes);
      if (GetParam().is_device() || plan.workspace_bytes >= chosen.workspace_bytes) continue;
      EXPECT_GT(plan.predicted_seconds * handicap_of(problem, plan), 1.03 * fast.predicted_seconds);
    }
    EXPECT_TRUE(listed);
  }
}

TEST_P(Plans, WorkspaceIsChecked) {
  if (GetParam().is_device()) GTEST_SKIP() << "on host memory; tests/gpu has it on a device";
  const Case c = plain_case(1, {5, 7, 3});
  const logitless::Plan plan(context_, pass_problem(c, logitless::Pass::forward_backward));
  const size_t bytes = plan.info().workspace_bytes;
  std::vector<float> hidden(15), classifier(21), bias(7), d_hidden(15), d_classifier(21), d_bias(7);
  logitless::Buffers b;
  b.hidden = hidden.data();
  b.classifier = classifier.data();
  b.bias = bias.data();
  b.targets = c.targets.data();
  b.d_hidden = d_hidden.data();
  b.d_classifier = d_classifier.data();
  b.d_bias = d_bias.data();
  const logitless::Workspace workspace(bytes + 64);
  EXPECT_NO_THROW(plan.run(b, workspace.bytes()));
  const auto refusal = [&](std::span<std::byte> memory) -> std::string {
    try {
      plan.run(b, memory);
    } catch (const logitless::Error& error) {
      EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(
      refusal(workspace.bytes().first(bytes - 1)),
      "workspace_bytes: expected at least " + std::to_string(bytes) + ", got " + std::to_string(bytes - 1));
  EXPECT_EQ(refusal({static_cast<std::byte*>(nullptr), bytes}), "workspace: expected a pointer, got null");
  EXPECT_EQ(refusal(workspace.bytes().subspan(8)),
            "workspace: expected 64-byte alignment, got a pointer off by 8");
}

INSTANTIATE_TEST_SUITE_P(Engines, Plans, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
