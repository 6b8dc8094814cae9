#pragma once
#include <string>
#include <vector>

#include "core/plan.h"
#include "core/problem.h"
#include "cuda/engines/engine.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

// ---- search.cpp
//
// Returns the fastest plan of each kind within the budget (0: none), and the plan that needs least memory.
// The problem's gradient method must be settled. A pure function.
std::vector<Plan> search_plans(const Problem& problem, const Device& device, const Choice& choice,
                               uint64_t budget);

// ---- plans.cpp
//
// Implements Backend::plans. A pure function, without calls of the driver. A sparsified problem (not
// kAlwaysSparsified) also gets exact plans, because sparsification may be slower. With has.saved it gets
// either exact or sparsified plans, and both passes get the same.
std::vector<Plan> make_plans(const Problem& problem, const Device& device, const std::string& requested,
                             uint64_t max_workspace_bytes);

}  // namespace logitless::cuda
