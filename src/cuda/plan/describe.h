#pragma once
#include <string>

#include "core/plan.h"
#include "core/problem.h"
#include "cuda/run/arena.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

// Bytes that a run of a plan takes beyond inputs and outputs.
uint64_t workspace_bytes(const Problem& problem, const PlanDetail& detail);
// Its kind, its cuts and its work.
Plan plan_of(const Problem& problem, const PlanDetail& detail);
// Its configuration, for people, behind the name of its main kernel.
std::string description_of(const Problem& problem, const PlanDetail& detail);

// ---- predict.cpp
// Predicts a plan's seconds, from products' whole waves of tiles, bytes and launches. For a sparsified plan
// these are a flat softmax's, at most. The figures are an H200's; other devices are scaled by their
// processors.
double predict_seconds(const Problem& problem, PlanKind kind, int64_t token_chunk, const PlanDetail& detail,
                       const Device& device);

// Plan::rounding_penalty of d_weight's roundings between chunks of tokens.
double rounding_penalty(const Problem& problem, int64_t token_chunk, const PlanDetail& detail);

// With it: where candidates are compared.
inline double ranked_seconds(const Problem& problem, PlanKind kind, int64_t token_chunk,
                             const PlanDetail& detail, const Device& device) {
  return predict_seconds(problem, kind, token_chunk, detail, device) *
         rounding_penalty(problem, token_chunk, detail);
}

}  // namespace logitless::cuda
