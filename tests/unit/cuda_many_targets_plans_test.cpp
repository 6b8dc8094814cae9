// Plans of the CUDA backend for several targets a row: no driver is called.
#include <gtest/gtest.h>

#include "cuda/run/bound_plan.h"
#include "head_plans.h"

namespace logitless::cuda::many_targets_plans {
namespace {

Problem problem_of(int64_t targets_per_row, DType dtype = DType::kBF16, Pass pass = Pass::kForwardBackward) {
  Problem p = head_problem({8192, 128256, 4096}, pass, dtype);
  p.targets_per_row = targets_per_row;
  return validated(p);
}

TEST(CudaManyTargetsPlans, AreThoseOfOneTargetAndWhatTheTargetsTake) {
  for (const Pass pass : {Pass::kForward, Pass::kForwardBackward, Pass::kBackward}) {
    const Plan one = best(problem_of(0, DType::kBF16, pass));
    for (const int64_t count : {1, 8, 64}) {
      const Problem p = problem_of(count, DType::kBF16, pass);
      const Plan many = best(p);
      EXPECT_EQ(many.config, one.config);
      EXPECT_EQ(many.implementation, one.implementation);
      EXPECT_EQ(many.workspace_bytes, workspace_bytes(p, detail_of(many)));
      const size_t rows = many.token_chunk > 0 ? static_cast<size_t>(many.token_chunk) : 8192;
      const size_t logits = rows * static_cast<size_t>(count) * sizeof(float);
      const size_t joined = 8192 * (sizeof(int64_t) + sizeof(double));
      EXPECT_EQ(many.workspace_bytes - one.workspace_bytes, logits + joined) << many.config;
    }
  }
}

TEST(CudaManyTargetsPlans, OfFloat64CountTheirLogits) {
  const auto bytes = [](int64_t count) {
    return best(problem_of(count, DType::kF64, Pass::kForward)).workspace_bytes;
  };
  EXPECT_EQ(bytes(8) - bytes(0), size_t{8192} * (8 + 1 + 1) * sizeof(double));
}

}  // namespace
}  // namespace logitless::cuda::many_targets_plans
