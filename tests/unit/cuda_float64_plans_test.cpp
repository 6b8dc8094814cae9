// Plans of problems in float64 for a made-up device: no driver is called.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/status.h"
#include "core/validate.h"
#include "cuda/backend.h"
#include "cuda/run/float64/arena.h"
#include "cuda/run/float64/plans.h"
#include "cuda/run/float64/run.h"
#include "plans_fixture.h"

namespace logitless::cuda::float64 {
namespace {

BlockSize size_of(const Plan& plan) {
  return dynamic_cast<const Float64Plan&>(*plan.backend_plan).size();
}

Problem problem_of(int64_t tokens, int64_t vocab, int64_t hidden, Pass pass) {
  Problem p;
  p.pass = pass;
  p.tokens = tokens;
  p.vocab = vocab;
  p.hidden = hidden;
  p.dtype.hidden = p.dtype.classifier = p.dtype.bias = DType::kF64;
  p.dtype.d_hidden = p.dtype.d_classifier = p.dtype.d_bias = DType::kF64;
  p.has.bias = true;
  p.has.d_hidden = p.has.d_classifier = p.has.d_bias = pass != Pass::kForward;
  return validated(p);
}

std::vector<Problem> problems() {
  std::vector<Problem> out;
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) {
    for (const int64_t tokens : {0, 1, 64, 100, 5000}) {
      for (const int64_t vocab : {1, 63, 64, 65, 32000}) out.push_back(problem_of(tokens, vocab, 300, pass));
    }
  }
  return out;
}

TEST(CudaFloat64Plans, TheWorkspaceIsWhatTheLayoutTakes) {
  for (const Problem& problem : problems()) {
    for (const Plan& plan : make_plans(problem, h200(), "", 0)) {
      Workspace counter;
      lay_out(problem, size_of(plan), counter);
      EXPECT_EQ(counter.used(), plan.workspace_bytes) << plan.config;
      const BlockSize size = size_of(plan);
      EXPECT_TRUE(size.columns == problem.vocab || size.columns % kStrip == 0) << plan.config;
      EXPECT_LE(size.rows, std::max<int64_t>(problem.tokens, 1));
    }
  }
}

// The parts lie one after the other, each within the workspace.
TEST(CudaFloat64Plans, TheArenaIsWithinTheWorkspace) {
  for (const Problem& problem : problems()) {
    const Plan plan = make_plans(problem, h200(), "", 0).back();
    std::vector<std::byte> memory(plan.workspace_bytes + kWorkspaceAlignment);
    Workspace placed(memory.data());
    const Arena a = lay_out(problem, size_of(plan), placed);
    const BlockSize size = size_of(plan);
    const auto offset = [&](const void* p) { return static_cast<const std::byte*>(p) - memory.data(); };
    EXPECT_EQ(offset(a.scalars), 0);
    EXPECT_EQ(a.stats != nullptr, problem.needs_forward());
    EXPECT_EQ(a.gradients != nullptr, problem.needs_backward());
    const size_t block_bytes = sizeof(double) * static_cast<size_t>(size.rows * size.columns);
    EXPECT_EQ(static_cast<size_t>(offset(a.block)) + align_up(block_bytes), plan.workspace_bytes);
    if (!problem.needs_backward()) continue;
    EXPECT_GE(offset(a.bias_sums) - offset(a.sums), static_cast<std::ptrdiff_t>(sizeof(double)) *
                                                        std::max(size.rows, size.columns) * problem.hidden);
  }
}

TEST(CudaFloat64Plans, ABudgetGetsTheFastestThatFits) {
  for (const Problem& problem : problems()) {
    const std::vector<Plan> all = make_plans(problem, h200(), "", 0);
    const Plan& smallest = all.back();
    for (const Plan& plan : all) {
      const Plan chosen =
          choose_plan(make_plans(problem, h200(), "", plan.workspace_bytes), plan.workspace_bytes);
      EXPECT_EQ(chosen.workspace_bytes, plan.workspace_bytes);
      EXPECT_LE(smallest.workspace_bytes, plan.workspace_bytes);
    }
    const std::vector<Plan> none = make_plans(problem, h200(), "", smallest.workspace_bytes - 1);
    EXPECT_THROW(choose_plan(none, smallest.workspace_bytes - 1), Error);
    EXPECT_EQ(none.back().workspace_bytes, smallest.workspace_bytes);
  }
}

// Blocks of logits, sums of their rows or columns, and a few numbers a token: nothing of N x V or V x D.
TEST(CudaFloat64Plans, MemoryIsThatOfBlocks) {
  const Problem problem = problem_of(8192, 128256, 1024, Pass::kForwardBackward);
  const std::vector<Plan> plans = make_plans(problem, h200(), "", 0);
  EXPECT_LE(plans.front().workspace_bytes, size_t{48} << 20);
  EXPECT_LE(plans.back().workspace_bytes, size_t{3} << 20);
}

TEST(CudaFloat64Plans, TheBackendTakesFloat64AndSaysWhatItDoesNot) {
  BackendOptions options;
  options.device_model = "h200";
  Problem problem = problem_of(8, 9, 10, Pass::kForwardBackward);
  EXPECT_EQ(cuda_backend().why_unsupported(problem, options), "");
  const Plan plan = cuda_backend().plans(problem, options, 0).front();
  EXPECT_EQ(plan.implementation + ": " + plan.reason, "portable: float64 operands");
  EXPECT_EQ(plan.config, "float64, blocks of 8 x 9");
  options.isa = "sm90";
  EXPECT_EQ(cuda_backend().why_unsupported(problem, options),
            "sm90 needs both operands in bf16, or both in fp16");
  options.isa = "";
  problem.gradient = GradientMethod::kThinned;
  EXPECT_EQ(cuda_backend().why_unsupported(problem, options),
            "gradient must be exact with float64 operands; the reference backend thins them, on the host");
}

}  // namespace
}  // namespace logitless::cuda::float64
