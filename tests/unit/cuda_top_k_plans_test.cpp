// Plans of the CUDA backend that find the largest logits, or have several targets a row. No driver is called.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/engines/engine.h"
#include "cuda/run/top/sizes.h"
#include "head_plans.h"

namespace logitless::cuda::top_k_plans {
namespace {

Problem problem_of(int64_t k, DType dtype = DType::kBF16, int64_t vocab = 128256) {
  Problem p = head_problem({8192, vocab, 4096}, Pass::kForward, dtype);
  p.top_k = k;
  return validated(p);
}

TEST(CudaTopKPlans, CostLittleMoreThanTheLoss) {
  const double loss = best(problem_of(0)).predicted_seconds;
  const Plan few = best(problem_of(8)), many = best(problem_of(64));
  for (const Plan* plan : {&few, &many}) {
    EXPECT_EQ(plan->engine, "sm90");
    EXPECT_EQ(plan->kind, PlanKind::kForward);
    EXPECT_NE(plan->config.find("lists of"), std::string::npos) << plan->config;
  }
  EXPECT_LE(few.cost_matmuls, 1.04);
  EXPECT_LE(few.predicted_seconds, 1.15 * loss);
  EXPECT_LE(many.cost_matmuls, 1.06);
  EXPECT_LE(many.predicted_seconds, 1.35 * loss);
  // The workspace is never N x V.
  EXPECT_LE(few.workspace_bytes, size_t{8192} * 128256 / 8);
  EXPECT_LE(many.workspace_bytes, size_t{8192} * 128256 / 4);
}

TEST(CudaTopKPlans, KeepTheBudget) {
  const Problem p = problem_of(64);
  const size_t most = best(p).workspace_bytes;
  int64_t rows = p.tokens + 1;
  for (const size_t budget : {most, most - 1, most / 2, most / 8, most / 16}) {
    const Plan plan = best(p, budget);
    EXPECT_LE(plan.workspace_bytes, budget);
    EXPECT_EQ(plan.workspace_bytes, bytes_of(p, detail_of(plan)).workspace);
    EXPECT_LE(plan.token_chunk, rows);
    rows = plan.token_chunk;
  }
  EXPECT_LT(rows, p.tokens / 4);
}

TEST(CudaTopKPlans, AreOfThePortableEngineWhereListsDoNotPay) {
  for (const Plan& plan : {best(problem_of(64, DType::kBF16, 20'000)), best(problem_of(8, DType::kF32))}) {
    EXPECT_EQ(plan.engine, "portable");
    EXPECT_EQ(plan.config.find("lists"), std::string::npos) << plan.config;
  }
  EXPECT_NE(best(problem_of(64, DType::kBF16, 20'000)).reason.find("needs a vocab of"), std::string::npos);
  EXPECT_EQ(best(problem_of(8, DType::kBF16, 20'000)).engine, "sm90");
}

TEST(CudaTopKPlans, SamplesHaveGroupsEnough) {
  for (const int64_t vocab : {384, 3072, 24'576, 30'011, 128'256, 262'144, 1'000'000}) {
    for (const int64_t k : {1, 2, 7, 8, 33, 64}) {
      const Problem p = problem_of(k, DType::kBF16, vocab);
      PlanDetail d;
      d.engine = engine_named("sm90");
      d.vocab_window = vocab;
      const EngineTraits traits = d.engine->traits();
      if (!why_not_listed(p, traits).empty()) continue;
      for (const int64_t window : {vocab, int64_t{64}, int64_t{1000}}) {
        d.copies_weight = window < vocab;
        d.vocab_window = window;
        const TopSizes s = top_sizes(p, d);
        EXPECT_LT((s.sampled - 1) * s.step, vocab);
        EXPECT_LE(s.window, s.sampled);
        EXPECT_GE(s.groups * traits.top_tile / traits.top_groups, s.sampled);
        EXPECT_GE(s.groups, 2 * k);
        EXPECT_LE(s.capacity, vocab / 4);
      }
    }
  }
}

Problem with_targets(int64_t targets_per_row, DType dtype, Pass pass) {
  Problem p = head_problem({8192, 128256, 4096}, pass, dtype);
  p.targets_per_row = targets_per_row;
  return validated(p);
}

TEST(CudaManyTargetsPlans, AreThoseOfOneTargetAndWhatTheTargetsTake) {
  for (const Pass pass : {Pass::kForward, Pass::kForwardBackward, Pass::kBackward}) {
    const Plan one = best(with_targets(0, DType::kBF16, pass));
    for (const int64_t count : {1, 8, 64}) {
      const Problem p = with_targets(count, DType::kBF16, pass);
      const Plan many = best(p);
      EXPECT_EQ(many.config, one.config);
      EXPECT_EQ(many.engine, one.engine);
      EXPECT_EQ(many.workspace_bytes, bytes_of(p, detail_of(many)).workspace);
      const size_t rows = many.token_chunk > 0 ? static_cast<size_t>(many.token_chunk) : 8192;
      const size_t logits = rows * static_cast<size_t>(count) * sizeof(float);
      const size_t joined = 8192 * (sizeof(int64_t) + sizeof(double));
      EXPECT_EQ(many.workspace_bytes - one.workspace_bytes, logits + joined) << many.config;
    }
  }
}

// Plans count entries of the largest logits, and logits of targets.
TEST(CudaTopKPlans, Float64PlansCountThem) {
  const auto bytes = [](int64_t k) { return best(problem_of(k, DType::kF64)).workspace_bytes; };
  EXPECT_EQ(bytes(8) - bytes(0), size_t{8192} * 8 * sizeof(TopEntry<double>));
  const auto with = [](int64_t count) {
    return best(with_targets(count, DType::kF64, Pass::kForward)).workspace_bytes;
  };
  EXPECT_EQ(with(8) - with(0), size_t{8192} * (8 + 1 + 1) * sizeof(double));
}

}  // namespace
}  // namespace logitless::cuda::top_k_plans
