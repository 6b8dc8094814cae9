// Plans of the CUDA backend for several targets a row: no driver is called.
#include <gtest/gtest.h>

#include "core/validate.h"
#include "cuda/plan/plans.h"
#include "cuda/run/bound_plan.h"
#include "plans_fixture.h"

namespace logitless::cuda::many_targets_plans {
namespace {

Problem problem_of(int64_t targets_per_row, DType dtype = DType::kBF16, Pass pass = Pass::kForwardBackward) {
  Problem p;
  p.pass = pass;
  p.tokens = 8192;
  p.vocab = 128256;
  p.hidden = 4096;
  p.dtype.hidden = p.dtype.classifier = p.dtype.bias = dtype;
  p.dtype.d_hidden = p.dtype.d_classifier = p.dtype.d_bias = dtype;
  p.has.d_hidden = p.has.d_classifier = pass != Pass::kForward;
  p.targets_per_row = targets_per_row;
  return validated(p);
}

Plan plan_of(const Problem& p, size_t budget = 0) {
  return choose_plan(make_plans(p, h200(), "", budget), budget);
}

size_t counted(const Problem& p, const Plan& plan) {
  return workspace_bytes(p, dynamic_cast<const CudaPlan&>(*plan.backend_plan).detail());
}

TEST(CudaManyTargetsPlans, AreThoseOfOneTargetAndWhatTheTargetsTake) {
  for (const Pass pass : {Pass::kForward, Pass::kForwardBackward, Pass::kBackward}) {
    const Plan one = plan_of(problem_of(0, DType::kBF16, pass));
    for (const int64_t count : {1, 8, 64}) {
      const Problem p = problem_of(count, DType::kBF16, pass);
      const Plan many = plan_of(p);
      EXPECT_EQ(many.config, one.config);
      EXPECT_EQ(many.implementation, one.implementation);
      EXPECT_EQ(many.workspace_bytes, counted(p, many));
      const size_t rows = many.token_chunk > 0 ? static_cast<size_t>(many.token_chunk) : 8192;
      const size_t logits = rows * static_cast<size_t>(count) * sizeof(float);
      const size_t joined = 8192 * (sizeof(int64_t) + sizeof(double));
      EXPECT_EQ(many.workspace_bytes - one.workspace_bytes, logits + joined) << many.config;
    }
  }
}

TEST(CudaManyTargetsPlans, KeepTheBudget) {
  const Problem p = problem_of(64);
  const size_t most = plan_of(p).workspace_bytes;
  for (const size_t budget : {most, most - 1, most / 2, most / 8, most / 16}) {
    const Plan plan = plan_of(p, budget);
    EXPECT_LE(plan.workspace_bytes, budget);
    EXPECT_EQ(plan.workspace_bytes, counted(p, plan));
  }
}

TEST(CudaManyTargetsPlans, OfFloat64CountTheirLogits) {
  const auto bytes = [](int64_t count) {
    return plan_of(problem_of(count, DType::kF64, Pass::kForward)).workspace_bytes;
  };
  EXPECT_EQ(bytes(8) - bytes(0), size_t{8192} * (8 + 1 + 1) * sizeof(double));
}

}  // namespace
}  // namespace logitless::cuda::many_targets_plans
