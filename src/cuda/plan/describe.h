#pragma once
#include <string>

#include "core/plan.h"
#include "core/problem.h"
#include "cuda/run/arena.h"

namespace logitless::cuda {

// Bytes that a run of a plan takes beyond inputs and outputs.
uint64_t workspace_bytes(const Problem& problem, const PlanDetail& detail);
// Its kind, its cuts and its work.
Plan plan_of(const Problem& problem, const PlanDetail& detail);
// Its configuration, for people, behind the name of its main kernel.
std::string description_of(const Problem& problem, const PlanDetail& detail);

}  // namespace logitless::cuda
