// Plans of problems in float64 for a made-up device: no driver is called.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "cuda/run/exact/arena.h"
#include "head_plans.h"

namespace logitless::cuda::float64_plans {
namespace {

Problem problem_of(const Head& head, Pass pass, DType dtype = DType::kF64) {
  Problem p = head_problem(head, pass, dtype);
  p.has.bias = true;
  p.has.d_bias = p.has.d_hidden;
  return validated(p);
}

std::vector<Problem> problems() {
  std::vector<Problem> out;
  for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) {
    for (const int64_t tokens : {0, 1, 100, 5000}) {
      for (const int64_t vocab : {1, 65, 32000}) {
        for (const int64_t hidden : {300, 301}) out.push_back(problem_of({tokens, vocab, hidden}, pass));
      }
    }
  }
  return out;
}

const Plan& smallest(const std::vector<Plan>& plans) {
  return *std::min_element(plans.begin(), plans.end(), [](const Plan& a, const Plan& b) {
    return a.workspace_bytes < b.workspace_bytes;
  });
}

TEST(CudaFloat64Plans, TheWorkspaceIsWhatTheLayoutTakes) {
  for (const Problem& p : problems()) {
    expect_exact_bytes(p, "float64");
    for (const Plan& plan : make_plans(p, h200(), "", 0)) {
      EXPECT_EQ(detail_of(plan).cached_columns, 0) << plan.config;
    }
  }
}

// The numbers of rows, and logits, are float64.
TEST(CudaFloat64Plans, TheArenaHasRoomForFloat64) {
  for (const Problem& p : problems()) {
    const std::vector<Plan> plans = make_plans(p, h200(), "", 0);
    const PlanDetail& d = detail_of(smallest(plans));
    std::vector<std::byte> memory(smallest(plans).workspace_bytes + kWorkspaceAlignment);
    Workspace placed(memory.data()), saved;
    const ArenaOf<double> a = lay_out_exact<double>(p, d, placed, saved);
    EXPECT_GE(a.lse_residual - a.lse, d.token_chunk);
    EXPECT_GE(static_cast<double*>(a.gemm) - a.logits, d.scratch_rows * d.scratch_columns);
  }
}

// The smallest plan has nothing of N x V or V x D. It takes twice the bytes of float32.
TEST(CudaFloat64Plans, TheSmallestIsTwiceThatOfFloat32) {
  const auto least = [](DType dtype) {
    const Problem p = problem_of({8192, 128256, 1024}, Pass::kForwardBackward, dtype);
    return smallest(make_plans(p, h200(), "portable", 0)).workspace_bytes;
  };
  EXPECT_LE(least(DType::kF64), 2 * least(DType::kF32));
  EXPECT_LE(least(DType::kF64), uint64_t{4} << 20);
}

TEST(CudaFloat64Plans, TheBackendTakesFloat64AndSaysWhatItDoesNot) {
  BackendOptions options;
  options.device_model = "h200";
  Problem problem = problem_of({8, 9, 10}, Pass::kForwardBackward);
  EXPECT_EQ(cuda_backend().why_unsupported(problem, options), "");
  EXPECT_EQ(cuda_backend().plans(problem, options, 0).front().engine, "portable");
  options.engine = "sm90";
  EXPECT_EQ(cuda_backend().why_unsupported(problem, options),
            "sm90 needs both operands in bf16, or both in fp16");
  options.engine = "";
  problem.gradient = GradientMethod::kSparsified;
  EXPECT_EQ(
      cuda_backend().why_unsupported(problem, options),
      "gradient must be exact with float64 operands; the reference backend sparsifies them, on the host");
}

}  // namespace
}  // namespace logitless::cuda::float64_plans
