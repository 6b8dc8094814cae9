#pragma once
#include <string>

#include "core/problem.h"
#include "cuda/cuda_arena.h"

namespace headroom::cuda {

// A plan's work in units of F.
double cost_of(const Problem& problem, const PlanDetail& detail);
// Its configuration, for people, behind the name of its main kernel.
std::string description_of(const Problem& problem, const PlanDetail& detail);

}  // namespace headroom::cuda
