#pragma once
#include <string>

#include "core/plan.h"
#include "core/problem.h"
#include "cuda/run/arena.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

// The bytes of a run beyond inputs and outputs.
struct PlanBytes {
  uint64_t workspace = 0;
  uint64_t saved = 0;          // of Buffers::saved
  uint64_t screen_weight = 0;  // of Buffers::screen_weight
};
PlanBytes bytes_of(const Problem& problem, const PlanDetail& detail);
// Returns a plan with its kind, its cuts and its work.
Plan plan_of(const Problem& problem, const PlanDetail& detail);
// Returns a plan's configuration as text for people, to follow the name of its main kernel.
std::string description_of(const Problem& problem, const PlanDetail& detail);

// ---- predict.cpp
//
// Predicts a plan's seconds from whole waves of tiles in products, from bytes and from launches. For a
// sparsified plan this is an upper bound: the time of a flat softmax. The figures are an H200's; other
// devices are scaled by their rates.
double predict_seconds(const Problem& problem, PlanKind kind, int64_t token_chunk, const PlanDetail& detail,
                       const Device& device);

// Returns Plan::rounding_penalty, for d_weight's roundings between chunks of tokens.
double rounding_penalty(const Problem& problem, int64_t token_chunk, const PlanDetail& detail);

// Returns the predicted seconds times the rounding penalty, by which candidates are compared.
inline double ranked_seconds(const Problem& problem, PlanKind kind, int64_t token_chunk,
                             const PlanDetail& detail, const Device& device) {
  return predict_seconds(problem, kind, token_chunk, detail, device) *
         rounding_penalty(problem, token_chunk, detail);
}

}  // namespace logitless::cuda
