#pragma once
#include <cstdint>

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/engines/engine.h"
#include "cuda/plan/plan_detail.h"

namespace logitless::cuda {

// The way an engine with groups (EngineTraits::top_groups) finds the largest logits: it makes thresholds from
// a sample of the columns, then lists of the logits that are not below them. The k-th largest maximum of the
// sample's groups is such a threshold: k logits of the row, one of each group, are not below it.
struct TopSizes {
  int64_t step = 1;      // every step-th column is in the sample
  int64_t sampled = 0;   // columns of the sample
  int64_t window = 0;    // columns of the sample in a launch
  int64_t groups = 0;    // of all launches
  int64_t capacity = 0;  // of a row's list
};
TopSizes top_sizes(const Problem& problem, const PlanDetail& detail);

// Returns an empty string, or why an engine with lists cannot run the problem.
std::string why_not_listed(const Problem& problem, const EngineTraits& traits);

template <class Real>
struct TopArenaOf {
  TopEntry<Real>* best = nullptr;  // [R, k] in order
  // Only with lists:
  float* bias = nullptr;              // [sampled]
  int32_t* mask = nullptr;            // [R, words of the sample]
  float* group_max = nullptr;         // [R, groups]
  float* threshold = nullptr;         // [R]
  int32_t* count = nullptr;           // [R]
  TopEntry<float>* listed = nullptr;  // [R, capacity]
  int32_t* redo_count = nullptr;      // scalar: rows whose lists had no room
  int32_t* redo_rows = nullptr;       // [R] these rows
};
using TopArena = TopArenaOf<float>;
template <class Real>
TopArenaOf<Real> lay_out_top(const Problem& problem, const PlanDetail& detail, int64_t rows,
                             Workspace& workspace);

}  // namespace logitless::cuda
