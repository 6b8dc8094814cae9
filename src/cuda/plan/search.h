#pragma once
#include <vector>

#include "core/plan.h"
#include "cuda/engines/engine.h"

namespace logitless::cuda {

// Of each kind the fastest plan within the budget (0: none) of a problem whose gradient is settled, and the
// plan that needs least memory. A pure function.
std::vector<Plan> search_plans(const Problem& problem, const Device& device, const Choice& choice,
                               uint64_t budget);

}  // namespace logitless::cuda
