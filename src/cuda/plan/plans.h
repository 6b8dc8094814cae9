#pragma once
#include <string>
#include <vector>

#include "core/plan.h"
#include "core/problem.h"
#include "cuda/engines/engine.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

// ---- search.cpp
// Returns the fastest plan of each kind within the budget (0: none), for a problem whose gradient is settled,
// and the plan that needs least memory. A pure function.
std::vector<Plan> search_plans(const Problem& problem, const Device& device, const Choice& choice,
                               uint64_t budget);

// ---- plans.cpp
// As Backend::plans. A pure function: no call of the driver. A sparsified problem (not kAlwaysSparsified) has
// exact plans, too, as sparsification may be slower; with keeps_draws either these or sparsified ones, and
// both passes the same.
std::vector<Plan> make_plans(const Problem& problem, const Device& device, const std::string& asked,
                             uint64_t max_workspace_bytes);

}  // namespace logitless::cuda
