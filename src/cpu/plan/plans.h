#pragma once
#include <vector>

#include "core/backend.h"

namespace logitless::cpu {

std::vector<Plan> plans(const Problem& problem, const BackendOptions& options, uint64_t max_workspace_bytes);

}  // namespace logitless::cpu
