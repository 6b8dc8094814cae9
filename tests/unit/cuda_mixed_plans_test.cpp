// Plans of the CUDA backend for operands that are copied into another dtype, on a made-up device.
#include <gtest/gtest.h>

#include <utility>

#include "cuda/plan/device_models.h"
#include "head_plans.h"

namespace logitless::cuda::mixed_plans {
namespace {

Problem mixed(Pass pass, DType hidden, DType weight) {
  Problem p = head_problem({4096, 128256, 2048}, pass, hidden);
  p.dtype.weight = p.dtype.d_weight = weight;
  return validated(p);
}

// Seconds of the same head with both operands in float32, of which nothing is copied.
double float32_seconds(Pass pass, size_t budget = 0) {
  return best(mixed(pass, DType::kF32, DType::kF32), budget).predicted_seconds;
}

// A copied weight once came in windows of 24 columns, because plans did not know that these cost more. It
// took ten times the time.
TEST(CudaMixedPlans, TheLossAloneCostsAboutOneProduct) {
  const Plan plan = best(mixed(Pass::kForward, DType::kF32, DType::kBF16));
  EXPECT_GE(detail_of(plan).vocab_window, 4096) << plan.config;
  EXPECT_LT(plan.predicted_seconds, 1.03 * float32_seconds(Pass::kForward)) << plan.config;
}

TEST(CudaMixedPlans, ExpLogitsAreKeptBesideACopyOfTheWeight) {
  const Plan plan = best(mixed(Pass::kForwardBackward, DType::kF32, DType::kBF16));
  EXPECT_EQ(plan.kind, PlanKind::kWhole) << plan.config;
  EXPECT_DOUBLE_EQ(plan.cost_matmuls, 3);
  EXPECT_LT(plan.predicted_seconds, 1.02 * float32_seconds(Pass::kForwardBackward)) << plan.config;
  EXPECT_LT(
      best(mixed(Pass::kForwardBackward, DType::kF32, DType::kBF16), 160 * kMiB).predicted_seconds,
      1.1 * float32_seconds(Pass::kForwardBackward, 160 * kMiB));  // float32 has more room for exp logits
}

// Plans count the copies beside the products: one of the weight where all of it is copied, else one for each
// pass over it.
TEST(CudaMixedPlans, CopiesAreCounted) {
  const double bytes = 128256.0 * 2048 * (2 + 4), seconds = bytes / 5e12;
  EXPECT_GT(best(mixed(Pass::kForward, DType::kF32, DType::kBF16)).predicted_seconds,
            float32_seconds(Pass::kForward) + seconds);
  EXPECT_GT(best(mixed(Pass::kForwardBackward, DType::kF32, DType::kBF16)).predicted_seconds,
            float32_seconds(Pass::kForwardBackward) + seconds);
}

// Products in bf16 of fp32 tensors with fp32 gradients, as under autocast.
Problem computed_in(DType dtype, Pass pass, int64_t tokens = 8192) {
  Problem p = mixed(pass, DType::kF32, DType::kF32);
  p.tokens = tokens;
  p.hidden = 4096;
  p.sequence_length = 0;
  p.compute_dtype = dtype;
  return validated(p);
}

Problem with_tensors_in(DType dtype, Problem p) {
  p.dtype.hidden = p.dtype.weight = p.dtype.d_hidden = p.dtype.d_weight = dtype;
  return validated(p);
}

TEST(CudaMixedPlans, ComputeDtypeChoosesTheKernels) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Plan plan = best(computed_in(dtype, Pass::kForwardBackward));
    EXPECT_EQ(plan.engine, "sm90") << plan.config;
    EXPECT_EQ(detail_of(plan).source, HiddenSource::kOutput) << "hidden rows fit in those of d_hidden";
  }
  EXPECT_EQ(best(computed_in(DType::kF32, Pass::kForwardBackward)).engine, "portable");
}

// The cost is two conversions of the weight, or one where all of it has room: 4% and 2.5% of three products
// of 8192 tokens.
TEST(CudaMixedPlans, ComputeDtypeCostsTheConversionsOnly) {
  const Problem problem = computed_in(DType::kBF16, Pass::kForwardBackward);
  const Problem bf16 = with_tensors_in(DType::kBF16, problem);
  for (const auto& [budget, most] : {std::pair{size_t{0}, 1.025}, std::pair{2560 * kMiB, 1.055}}) {
    const Plan plan = best(problem, budget);
    EXPECT_EQ(plan.kind, PlanKind::kWhole) << plan.config;
    EXPECT_LT(plan.predicted_seconds, most * best(bf16, budget).predicted_seconds) << plan.config;
    EXPECT_TRUE(budget == 0 || plan.workspace_bytes <= budget) << plan.config;
  }
  EXPECT_LT(
      best(computed_in(DType::kBF16, Pass::kForward)).predicted_seconds,
      1.08 *
          best(with_tensors_in(DType::kBF16, computed_in(DType::kBF16, Pass::kForward))).predicted_seconds);
}

// The last windows of a weight that no width divides cost no more than their share.
TEST(CudaMixedPlans, TailsAreNotSlow) {
  Problem p = computed_in(DType::kBF16, Pass::kForwardBackward);
  double before = 0;
  for (int64_t vocab = 98304; vocab < 124000; vocab += 1024) {
    p.vocab = p.vocab_total = vocab;
    const double seconds = best(p, 2560 * kMiB).predicted_seconds;
    EXPECT_TRUE(before == 0 || seconds < 1.03 * before) << vocab;
    before = seconds;
  }
}

TEST(CudaMixedPlans, TF32IsCounted) {
  Problem p = mixed(Pass::kForwardBackward, DType::kF32, DType::kF32);
  const double exact = best(p).predicted_seconds;
  p.allow_tf32 = true;
  EXPECT_LT(best(p).predicted_seconds, exact / 3);
  Problem bf16 = mixed(Pass::kForwardBackward, DType::kBF16, DType::kBF16);
  const double without = best(bf16).predicted_seconds;
  bf16.allow_tf32 = true;
  EXPECT_EQ(best(bf16).predicted_seconds, without) << "there is no fp32 to be rounded";
}

}  // namespace
}  // namespace logitless::cuda::mixed_plans
