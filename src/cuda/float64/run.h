#pragma once
#include <cuda_runtime_api.h>

#include "core/buffers.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace headroom::cuda::float64 {

// Queues a plan of a problem in float64 on a stream of the current device. Sums have one order, whatever the
// blocks: every plan gives the same bits.
void run(const Problem& problem, const Plan& plan, const Buffers& buffers, Workspace workspace,
         cudaStream_t stream);

}  // namespace headroom::cuda::float64
