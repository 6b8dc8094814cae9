#pragma once
#include "core/backend.h"

namespace headroom::cpu {

void run(const Problem& problem, const Plan& plan, const Buffers& buffers, Workspace workspace,
         const BackendOptions& options, void* stream);

}  // namespace headroom::cpu
