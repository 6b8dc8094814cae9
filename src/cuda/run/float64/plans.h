#pragma once
#include <string>
#include <vector>

#include "core/plan.h"
#include "core/problem.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda::float64 {

// Of a problem in float64, as Backend::plans. A pure function: no call of the driver.
std::vector<Plan> make_plans(const Problem& problem, const Device& device, const std::string& asked,
                             uint64_t max_workspace_bytes);

}  // namespace logitless::cuda::float64
