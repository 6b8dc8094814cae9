#pragma once
// Common parts of the tests of CUDA's plans: plans of one head on a made-up H200. No driver is called.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/plan.h"
#include "core/status.h"
#include "core/validate.h"
#include "cuda/plan/describe.h"
#include "cuda/plan/plans.h"
#include "cuda/run/bound_plan.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

inline Device h200() {
  Device device;
  device.name = "H200";
  device.capability = 90;
  device.processors = 132;
  device.memory_bytes = size_t{139} << 30;
  return device;
}

inline const PlanDetail& detail_of(const Plan& plan) {
  return dynamic_cast<const CudaPlan&>(*plan.backend_plan).detail();
}

inline constexpr size_t kMiB = size_t{1} << 20;

struct Head {
  int64_t tokens, vocab, hidden;
  const char* name = "";
};

// A loss with the gradients of both matrices, all of one dtype.
inline Problem head_problem(const Head& head, Pass pass = Pass::kForwardBackward,
                            DType dtype = DType::kBF16) {
  Problem p;
  p.pass = pass;
  p.tokens = head.tokens;
  p.vocab = head.vocab;
  p.hidden = head.hidden;
  p.dtype.hidden = p.dtype.weight = p.dtype.bias = dtype;
  p.dtype.d_hidden = p.dtype.d_weight = p.dtype.d_bias = dtype;
  p.has.d_hidden = p.has.d_weight = pass != Pass::kForward;
  return validated(p);
}

// The fastest plan within the budget, by the named engine if there is a name.
inline Plan best(const Problem& problem, size_t budget = 0, const char* engine = "") {
  return choose_plan(make_plans(problem, h200(), engine, budget), budget);
}

// Expects every plan's bytes to be those that its layout takes, whatever the options. Every budget is kept,
// or the refusal names one that works.
inline void expect_exact_bytes(const Problem& problem, const std::string& what) {
  size_t least = SIZE_MAX;
  for (const Plan& plan : make_plans(problem, h200(), "", 0)) least = std::min(least, plan.workspace_bytes);
  for (const size_t budget : {size_t{0}, 2560 * kMiB, 1024 * kMiB, 512 * kMiB, 64 * kMiB, kMiB, least - 1}) {
    const std::vector<Plan> plans = make_plans(problem, h200(), "", budget);
    size_t smallest = SIZE_MAX;
    for (const Plan& plan : plans) {
      EXPECT_EQ(bytes_of(problem, detail_of(plan)).workspace, plan.workspace_bytes)
          << what << ", " << plan.config;
      smallest = std::min(smallest, plan.workspace_bytes);
    }
    if (budget == 0 || smallest <= budget) {
      EXPECT_LE(choose_plan(plans, budget).workspace_bytes, budget == 0 ? SIZE_MAX : budget) << what;
    } else {
      EXPECT_THROW(choose_plan(plans, budget), Error) << what;
      EXPECT_LE(best(problem, smallest).workspace_bytes, smallest) << what;
    }
  }
}

}  // namespace logitless::cuda
