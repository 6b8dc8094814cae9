#pragma once
#include <string>
#include <vector>

#include "core/plan.h"
#include "core/problem.h"
#include "cuda/arena.h"
#include "cuda/device.h"

namespace headroom::cuda {

// Which kernels a problem gets on a device, and why. `asked` by name, or empty.
struct Choice {
  Implementation implementation = Implementation::kPortable;
  std::string reason;
};
const char* implementation_name(Implementation implementation);
Choice choose_implementation(const Problem& problem, const Device& device, const std::string& asked);

// As Backend::plans. A pure function: no call of the driver. A thinned problem (not kAlwaysThinned) has exact
// plans, too, as thinning may be slower; with keeps_draws either these or thinned ones, and both passes the
// same.
std::vector<Plan> make_plans(const Problem& problem, const Device& device, const std::string& asked,
                             size_t max_workspace_bytes);

}  // namespace headroom::cuda
