// Tiles of passes over two heads: they fit the budget, and refusals name the smallest one that works.
#include "core/divergence_plan.h"

#include <gtest/gtest.h>
#include <logitless/divergence.h>

#include <functional>
#include <string>
#include <vector>

#include "core/status.h"

namespace logitless {
namespace {

constexpr DivergenceOperands kFloat32{64, DType::kF32, DType::kF32, DType::kF32};
constexpr DivergenceOperands kBFloat16{64, DType::kBF16, DType::kBF16, DType::kBF16};
constexpr DivergenceOperands kConverted{64, DType::kBF16, DType::kBF16, DType::kF32};

DivergenceProblem problem(Pass pass, int64_t rows, int64_t vocab, const DivergenceOperands& head = kFloat32) {
  return {.pass = pass,
          .on_host = false,
          .want_d_hidden = true,
          .want_d_weight = true,
          .rows = rows,
          .vocab = vocab,
          .student = head,
          .teacher = head};
}

uint64_t least_budget(DivergenceProblem p) {
  p.budget = 1;
  try {
    plan_divergence(p);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kBudgetTooSmall);
    return error.info()->required_bytes;
  }
  return 1;
}

std::vector<DivergenceProblem> problems() {
  std::vector<DivergenceProblem> all;
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) {
    for (const int64_t rows : {0, 1, 16, 17, 97, 8192}) {
      for (const int64_t vocab : {1, 63, 65, 513, 50257}) {
        for (const auto& head : {kFloat32, kBFloat16, kConverted}) {
          for (const int variant : {0, 1, 2, 3}) {
            DivergenceProblem p = problem(pass, rows, vocab, head);
            p.on_host = variant == 1;
            p.gathers_rows = p.want_d_bias = variant == 2;
            p.want_d_weight = variant != 3;
            all.push_back(p);
          }
        }
      }
    }
  }
  return all;
}

void expect_tiles(const DivergenceProblem& p, const DivergenceTiles& tiles, bool is_whole) {
  if (tiles.rows == 0) return;
  EXPECT_LE(tiles.rows, std::max<int64_t>(p.rows, 1));
  EXPECT_TRUE(tiles.window >= 1 && tiles.window <= p.vocab) << tiles.window;
  EXPECT_TRUE(is_whole || tiles.window == p.vocab || tiles.window % 64 == 0) << tiles.window;
  EXPECT_LE(tiles.bytes, p.budget);
  const uint64_t stored = static_cast<uint64_t>(tiles.rows * (is_whole ? p.vocab : tiles.window)) * 8;
  EXPECT_GE(tiles.bytes, stored);  // float32 products of both heads
}

TEST(DivergencePlan, TilesFitTheBudgetAndRefusalsNameTheLeast) {
  for (DivergenceProblem p : problems()) {
    const uint64_t least = least_budget(p);
    SCOPED_TRACE("pass " + std::to_string(static_cast<int>(p.pass)) + ", " + std::to_string(p.rows) + " x " +
                 std::to_string(p.vocab) + ", at least " + std::to_string(least));
    for (const uint64_t budget : {least, least + 1, 2 * least, 50 * least}) {
      p.budget = budget;
      const DivergencePlan plan = plan_divergence(p);
      expect_tiles(p, plan.values, true);
      expect_tiles(p, plan.gradients, false);
      EXPECT_EQ(plan.values.rows > 0, p.pass != Pass::kBackward);
      EXPECT_TRUE(p.pass == Pass::kForwardBackward ||
                  (plan.gradients.rows > 0) == (p.pass == Pass::kBackward));
    }
    p.budget = least - 1;
    EXPECT_THROW(plan_divergence(p), Error);
  }
}

TEST(DivergencePlan, AForwardPassNeedsTheBytesOfLaterGradients) {
  const uint64_t later = least_budget(problem(Pass::kForward, 97, 50, kConverted));
  EXPECT_GE(later, least_budget(problem(Pass::kBackward, 97, 50, kConverted)));
  DivergenceProblem alone = problem(Pass::kForward, 97, 50, kConverted);
  alone.want_d_hidden = alone.want_d_weight = false;
  EXPECT_LT(least_budget(alone), later);
}

TEST(DivergencePlan, GradientsAreMadeWithValuesWhereManyRowsFit) {
  DivergenceProblem p = problem(Pass::kForwardBackward, 8192, 50257);
  EXPECT_EQ(plan_divergence(p).gradients.rows, 0);
  constexpr uint64_t kRowBytes = uint64_t{8} * 50304;  // columns are padded to 64
  p.budget = 1024 * kRowBytes;
  DivergencePlan plan = plan_divergence(p);
  EXPECT_EQ(plan.values.rows, 1024);
  EXPECT_EQ(plan.gradients.rows, 0);
  p.budget -= 1;
  plan = plan_divergence(p);
  EXPECT_EQ(plan.values.rows, 1023);
  EXPECT_GT(plan.gradients.rows, 0);
}

TEST(DivergencePlan, ValuesOfRanksTakeBytesForTheirExchanges) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) {
    DivergenceProblem p = problem(pass, 4096, 50257);
    const uint64_t alone = plan_divergence(p).values.bytes, least = least_budget(p);
    p.ranks = 8;
    const DivergencePlan shared = plan_divergence(p);
    EXPECT_EQ(shared.values.bytes > alone, pass != Pass::kBackward);
    EXPECT_GE(least_budget(p), least);
  }
}

// A float32 gradient holds its own sums. One product over all rows makes a bfloat16 gradient of the weight.
TEST(DivergencePlan, BuffersOfSums) {
  const DivergencePlan wide = plan_divergence(problem(Pass::kBackward, 300, 5000, kFloat32));
  EXPECT_EQ(wide.gradients.hidden_sums, 0);
  EXPECT_EQ(wide.gradients.weight_sums, 0);
  DivergenceProblem p = problem(Pass::kBackward, 300, 5000, kBFloat16);
  const DivergencePlan whole = plan_divergence(p);
  EXPECT_EQ(whole.gradients.rows, 300);
  EXPECT_EQ(whole.gradients.hidden_sums, 300);
  EXPECT_EQ(whole.gradients.weight_sums, 0);
  p.budget = 200'000;
  const DivergencePlan parts = plan_divergence(p);
  EXPECT_LT(parts.gradients.rows, 300);
  EXPECT_EQ(parts.gradients.weight_sums, parts.gradients.window);
}

struct BadProblem {
  const char* message;
  std::function<void(logitless_divergence_problem&)> spoil;
};

TEST(DivergencePlan, EveryInvalidArgumentIsNamed) {
  using P = logitless_divergence_problem;
  P valid = {};
  valid.rows = 3;
  valid.vocab = 10;
  valid.student_width = valid.teacher_width = 4;
  logitless_context* context = nullptr;
  ASSERT_EQ(logitless_context_create(nullptr, &context), LOGITLESS_OK);
  logitless_divergence_tiles values, gradients;
  ASSERT_EQ(logitless_divergence_plan(context, &valid, &values, &gradients), LOGITLESS_OK);
  EXPECT_EQ(values.rows, 3);
  EXPECT_EQ(values.window, 10);
  EXPECT_EQ(values.workspace_bytes, 2u * 4 * 3 * 64);
  EXPECT_EQ(gradients.rows, 0);
  const BadProblem problems[] = {
      {"pass: expected 0 to 2, got 3", [](P& p) { p.pass = 3; }},
      {"want_d_hidden: expected a gradient in a backward pass, got none",
       [](P& p) { p.pass = LOGITLESS_BACKWARD; }},
      {"want_d_bias: expected 0 or 1, got 2", [](P& p) { p.want_d_bias = 2; }},
      {"rows: expected at least 0, got -1", [](P& p) { p.rows = -1; }},
      {"vocab: expected at least 1, got 0", [](P& p) { p.vocab = 0; }},
      {"ranks: expected at least 0, got -1", [](P& p) { p.ranks = -1; }},
      {"teacher_width: expected at least 1, got 0", [](P& p) { p.teacher_width = 0; }},
      {"student_product_dtype: expected a float dtype, got int64",
       [](P& p) { p.student_product_dtype = LOGITLESS_I64; }},
      {"copied_biases: expected 0 to 2, got 3", [](P& p) { p.copied_biases = 3; }}};
  for (const BadProblem& each : problems) {
    P p = valid;
    each.spoil(p);
    EXPECT_EQ(logitless_divergence_plan(context, &p, &values, &gradients), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_STREQ(logitless_last_error(), each.message);
  }
  valid.max_workspace_bytes = 1;
  EXPECT_EQ(logitless_divergence_plan(context, &valid, &values, &gradients), LOGITLESS_BUDGET_TOO_SMALL);
  EXPECT_STREQ(logitless_last_error(),
               "max_workspace_bytes: expected at least 512 bytes for this problem, got 1 byte");
  logitless_error_info info;
  logitless_last_error_info(&info);
  EXPECT_EQ(info.required_bytes, 512u);
  logitless_context_destroy(context);
}

}  // namespace
}  // namespace logitless
