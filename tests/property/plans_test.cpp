// Every plan and every budget gives the same results, and no budget is exceeded.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <string_view>

#include "engine_test.h"

namespace logitless_test {
namespace {

class Plans : public EngineTest {
 protected:
  // The smallest budget, as the refusal of one byte names it.
  size_t smallest_budget(logitless::Problem problem) const {
    problem.max_workspace_bytes = 1;
    const logitless::Error error = refusal([&] { logitless::Plan(context_, problem); });
    EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL);
    EXPECT_EQ(error.argument, "max_workspace_bytes");
    EXPECT_EQ(error.got, "1 byte");
    return error.required_bytes;
  }

  logitless::PlanInfo fastest(logitless::Problem problem) const {
    problem.max_workspace_bytes = LOGITLESS_FASTEST;
    return logitless::Plan(context_, problem).info();
  }

  static logitless::Pass pass_of(const Case& c) {
    if (c.mode == Mode::kForwardBackward) return logitless::Pass::forward_backward;
    return c.mode == Mode::kForward ? logitless::Pass::forward : logitless::Pass::backward;
  }

  // Random problems, and larger ones whose plans make several chunks.
  std::vector<Case> cases() const {
    const auto in_one_run = [](Case* c) { return c->mode != Mode::kForwardThenBackward; };
    std::vector<Case> out = random_cases(300, seeds(25), {}, in_one_run);
    if (engine().has_float64()) {
      for (Case& c : random_cases(300, seeds(20), {.only_fp64 = true})) out.push_back(std::move(c));
    }
    const PlainSize size =
        engine().is_reference() ? PlainSize{30, 100, 20} : PlainSize{520, is_slowed_down() ? 300 : 1100, 40};
    for (logitless_dtype dtype : {engine().plain_dtype(), LOGITLESS_BF16, LOGITLESS_F16, LOGITLESS_F64}) {
      const Case c = plain_case(1, size, dtype);
      if (engine().can_run(c.problem)) out.push_back(c);
    }
    return out;
  }
};

// Cases whose plans are of a kind of their own.
std::vector<Case> special_cases(const Engine& engine) {
  std::vector<Case> out;
  const auto add = [&](Case c) {
    if (engine.can_run(c.problem)) out.push_back(std::move(c));
  };
  const bool fast = !engine.is_reference() && !is_slowed_down();
  const logitless_dtype plain = engine.plain_dtype();
  // A gradient in a dtype that no matrix product writes passes through a window of the workspace. The
  // vocabulary is wider than any such window.
  for (logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
    Case c = plain_case(2, {24, is_slowed_down() ? 3000 : 30000, 8}, plain);
    c.problem.dtype.d_weight = dtype;
    add(c);
  }
  // The smallest plans go over the weight once more instead of keeping an fp32 sum beside a 16-bit d_weight.
  Case many = plain_case(4, fast ? PlainSize{1300, 1000, 40} : PlainSize{600, 60, 8}, LOGITLESS_BF16);
  many.problem.has.d_hidden = 0;
  add(many);
  many.problem.has.d_hidden = 1;
  many.problem.softcap = 5;
  many.problem.label_smoothing = 0.1;
  many.problem.dtype.d_weight = LOGITLESS_F16;
  add(many);
  // Few or no rows of some chunks of tokens count, with and without gradients to add to. The valid rows are
  // the last ones, so that they move where ignored rows are left out.
  const PlainSize size{fast ? 1100 : 110, 130, 16};
  for (int64_t valid : {int64_t{0}, int64_t{1}, size.tokens / 4, size.tokens - 1}) {
    Case c = plain_case(3, size, plain);
    c.problem.reduction = LOGITLESS_REDUCTION_SUM;
    for (int64_t i = 0; i < size.tokens - valid; ++i) {
      c.targets[static_cast<size_t>(i)] = c.problem.ignore_index;
    }
    add(c);
    c.mode = Mode::kForwardThenBackward;
    add(c);
    c.mode = Mode::kForwardBackward;
    Random random(4);
    logitless::Problem& p = c.problem;
    p.accumulate.d_hidden = p.accumulate.d_weight = p.accumulate.d_bias = 1;
    p.dtype.d_hidden = p.dtype.d_weight = p.dtype.d_bias = LOGITLESS_F32;
    c.d_hidden_start = normal_values(random, size.tokens * size.hidden, 1, LOGITLESS_F32);
    c.d_weight_start = normal_values(random, size.vocab * size.hidden, 1, LOGITLESS_F32);
    c.d_bias_start = normal_values(random, size.vocab, 1, LOGITLESS_F32);
    add(c);
  }
  // Logits rise from column to column. Sums and kept exp logits of the first columns are relative to an
  // offset that suits no later ones.
  for (const bool is_invariant : {false, true}) {
    for (const logitless_dtype dtype : {plain, LOGITLESS_BF16, LOGITLESS_F16}) {
      Case c = plain_case(5, {24, fast ? 9000 : 3000, 8}, dtype);
      c.problem.dtype.bias = c.problem.dtype.d_bias = LOGITLESS_F32;
      for (size_t j = 0; j < c.bias.size(); ++j) {
        c.bias[j] = static_cast<float>(60.0 * static_cast<double>(j) / static_cast<double>(c.bias.size()));
      }
      for (int64_t& target : c.targets) target = c.problem.vocab - 1 - target % 100;
      c.problem.batch_invariant = is_invariant;
      c.problem.has.entropy = 1;
      add(c);
    }
  }
  // Several targets a row.
  for (const int64_t count : {1, 5, 64}) {
    Case c = plain_case(static_cast<uint64_t>(count), {130, fast ? 1100 : 300, 24}, plain);
    Random random(7);
    give_targets(random, &c, count, 0, 1);
    for (int64_t i = 0; i < 20 * count; ++i) c.targets[static_cast<size_t>(i)] = c.problem.ignore_index;
    add(c);
  }
  // The largest logits, from operands as they are and from converted ones.
  Case top = plain_case(10, {600, fast ? 6201 : 620, 20}, plain);
  remove_bias(&top);
  top.mode = Mode::kForward;
  top.problem.has.argmax = 1;
  top.problem.top_k = 16;
  for (size_t row = 0; row < 600; row += 5) top.targets[row] = top.problem.ignore_index;
  add(top);
  top.problem.dtype.hidden = top.problem.dtype.weight = LOGITLESS_F32;
  top.problem.compute_dtype = LOGITLESS_BF16;
  add(top);
  return out;
}

// The smallest budget is named and tight. Every budget from it on agrees with the oracle, and none is
// exceeded. On a host none changes a bit.
TEST_P(Plans, EveryBudgetAgreesSlow) {
  std::vector<Case> all = cases();
  for (Case& each : special_cases(engine())) all.push_back(std::move(each));
  for (const Case& c : all) {
    SCOPED_TRACE(describe(c));
    logitless::Problem problem = pass_problem(c, pass_of(c));
    const Expected expected(c);
    const Outputs most = solve(c, LOGITLESS_FASTEST);
    const size_t smallest = smallest_budget(problem), largest = fastest(problem).workspace_bytes;
    problem.max_workspace_bytes = smallest;
    EXPECT_EQ(logitless::Plan(context_, problem).info().workspace_bytes, smallest);
    problem.max_workspace_bytes = smallest - 1;
    EXPECT_THROW(logitless::Plan(context_, problem), logitless::Error);
    problem.max_workspace_bytes = 0;
    std::set<size_t> budgets = plan_bytes(problem);
    budgets.insert(0);
    for (auto budget = static_cast<double>(smallest); budget < static_cast<double>(largest); budget *= 1.6) {
      budgets.insert(static_cast<size_t>(std::ceil(budget)));
    }
    for (size_t budget : budgets) {
      SCOPED_TRACE(budget);
      try {
        const Outputs got = solve(c, budget);
        expected.check(engine(), got);
        EXPECT_TRUE(got.workspace_bytes >= smallest || c.mode == Mode::kForwardThenBackward);
        if (!is_device()) {
          EXPECT_STREQ(first_difference(got, most), "");
        }
      } catch (const logitless::Error& error) {  // a pass of its own may need more
        EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
        EXPECT_EQ(c.mode, Mode::kForwardThenBackward);
      }
    }
  }
}

// With rows of the weight as wide as there are tokens, exp logits are kept where d_weight will be, if its
// rows lie without gaps. Elsewhere they are computed again, bit for bit.
TEST_P(Plans, SameBitsWhereverTheWeightsGradientLiesSlow) {
  if (is_device()) GTEST_SKIP() << "a product's algorithm there depends on alignment";
  const int64_t vocab = is_slowed_down() ? 500 : 1000;
  for (logitless_dtype dtype : {engine().plain_dtype(), LOGITLESS_BF16, LOGITLESS_F16}) {
    for (int64_t hidden : {95, 96, 192}) {
      Case c = plain_case(8, {96, vocab, hidden}, dtype);
      c.problem.label_smoothing = hidden == 96 ? 0.1 : 0;
      SCOPED_TRACE(describe(c));
      const Expected expected(c);
      const Outputs dense = solve(c);
      expected.check(engine(), dense);
      for (const Layout& layout : {Layout{7, 0}, Layout{0, 1}, Layout{0, 2}}) {
        c.d_weight_layout = layout;
        EXPECT_STREQ(first_difference(solve(c), dense), "") << layout.padding << ", " << layout.skew;
      }
    }
  }
}

// The workspace then has no part of an [N, V] matrix.
TEST_P(Plans, ExpLogitsAreKeptWhereTheWeightsGradientWillBe) {
  if (is_device() || engine().is_reference()) GTEST_SKIP() << "only for the CPU's plans";
  logitless::Problem problem;
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = 1000;
  problem.vocab = 448 * 224;  // whole blocks
  problem.hidden = 1024;
  problem.has.d_hidden = problem.has.d_weight = 1;
  problem.max_workspace_bytes = LOGITLESS_FASTEST;
  const size_t exp_logits = size_t{1000} * 448 * 224 * sizeof(float);
  const logitless::Context context = make_context(engine(), 2);
  const logitless::PlanInfo wide = logitless::Plan(context, problem).info();
  EXPECT_LT(wide.cost_matmuls, 3.1);
  EXPECT_LT(wide.workspace_bytes, exp_logits / 4);
  // A gradient that is added to is not free to write, and one of fewer columns has no room.
  problem.accumulate.d_weight = 1;
  EXPECT_GT(logitless::Plan(context, problem).info().workspace_bytes, exp_logits);
  problem.accumulate.d_weight = 0;
  problem.hidden = 900;
  EXPECT_GT(logitless::Plan(context, problem).info().workspace_bytes, exp_logits);
}

// The head of a model of 8 billion parameters, planned alone.
TEST_P(Plans, ALargeHeadFitsInLittle) {
  if (is_device() || engine().is_reference()) GTEST_SKIP() << "only for the CPU's plans";
  logitless::Problem problem;
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = 8192;
  problem.vocab = 151936;
  problem.hidden = 4096;
  problem.has.d_hidden = problem.has.d_weight = 1;
  problem.max_workspace_bytes = size_t{64} << 20;
  for (int32_t dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16}) {
    problem.dtype.hidden = problem.dtype.weight = problem.dtype.d_hidden = problem.dtype.d_weight = dtype;
    EXPECT_NO_THROW(logitless::Plan(make_context(engine(), 2), problem)) << dtype;
  }
}

// The factor by which another plan may be faster: a rounding of d_weight, one for each chunk of tokens, must
// gain 4%.
double penalty_of(const logitless::Problem& problem, const logitless::PlanInfo& plan) {
  if (std::string_view(plan.config).find("d_weight rounded") == std::string_view::npos) return 1;
  const int64_t chunk = std::max<int64_t>(plan.token_chunk, 1);
  return 1 + 0.04 * static_cast<double>((std::max<int64_t>(problem.tokens, 1) - 1) / chunk);
}

// The list of plans has the chosen one, which is the fastest.
TEST_P(Plans, TheFastestIsChosen) {
  for (const Case& c : cases()) {
    logitless::Problem problem = pass_problem(c, pass_of(c));
    problem.max_workspace_bytes = LOGITLESS_FASTEST;
    const logitless::PlanInfo chosen = logitless::Plan(context_, problem).info();
    EXPECT_EQ(std::string(chosen.backend), engine().backend);
    EXPECT_GT(chosen.cost_matmuls, 0);
    bool listed = false;
    for (const logitless::PlanInfo& plan : context_.plans(problem)) {
      EXPECT_LE(chosen.predicted_seconds, plan.predicted_seconds * penalty_of(problem, plan));
      listed = listed || (plan.kind == chosen.kind && plan.workspace_bytes == chosen.workspace_bytes);
    }
    EXPECT_TRUE(listed) << describe(c);
  }
}

// By default no listed plan is smaller and as good, within 3% of the fastest.
TEST_P(Plans, TheDefaultIsSmallAndNearlyTheFastest) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(describe(c));
    const logitless::Problem problem = pass_problem(c, pass_of(c));
    const logitless::PlanInfo chosen = logitless::Plan(context_, problem).info(), fast = fastest(problem);
    EXPECT_NE(std::string_view(chosen.choice).find('%'), std::string_view::npos) << chosen.choice;
    EXPECT_STREQ(fast.choice, "the fastest");
    EXPECT_LE(chosen.workspace_bytes, fast.workspace_bytes);
    EXPECT_LE(chosen.predicted_seconds, 1.06 * fast.predicted_seconds);
    bool listed = false;
    for (const logitless::PlanInfo& plan : context_.plans(problem)) {
      listed = listed || (plan.kind == chosen.kind && plan.workspace_bytes == chosen.workspace_bytes);
      if (is_device() || plan.workspace_bytes >= chosen.workspace_bytes) continue;
      EXPECT_GT(plan.predicted_seconds * penalty_of(problem, plan), 1.03 * fast.predicted_seconds);
    }
    EXPECT_TRUE(listed);
  }
}

TEST_P(Plans, WorkspaceIsChecked) {
  const Case c = plain(1, {5, 7, 3});
  const logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
  const logitless::Plan plan(context_, problem);
  const size_t bytes = plan.info().workspace_bytes;
  RunTensors tensors(problem, c);
  tensors.add_inputs();
  tensors.add_outputs(0, is_device(), false);
  const logitless::Workspace workspace(bytes + 64);
  if (!is_device()) {
    EXPECT_NO_THROW(plan.run(tensors.buffers(), workspace.bytes()));
  }
  const auto refused = [&](std::span<std::byte> memory) -> std::string {
    const logitless::Error error = refusal([&] { plan.run(tensors.buffers(), memory); });
    EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
    return error.what();
  };
  EXPECT_EQ(
      refused(workspace.bytes().first(bytes - 1)),
      "workspace_bytes: expected at least " + std::to_string(bytes) + ", got " + std::to_string(bytes - 1));
  EXPECT_EQ(refused({static_cast<std::byte*>(nullptr), bytes}), "workspace: expected a pointer, got null");
  EXPECT_EQ(refused(workspace.bytes().subspan(8)),
            "workspace: expected 64-byte alignment, got a pointer off by 8");
}

LOGITLESS_TEST_ON(Plans, engines());

}  // namespace
}  // namespace logitless_test
