#pragma once
#include "core/backend.h"

namespace headroom::cuda {

// Queues a plan of the CUDA backend on a stream; allocates nothing and waits for nothing.
void run(const Problem& problem, const Plan& plan, const Buffers& buffers, Workspace workspace,
         const BackendOptions& options, void* stream);

// As Backend::scale.
void scale(void* data, DType dtype, int64_t count, const void* factor, const BackendOptions& options,
           void* stream);

}  // namespace headroom::cuda
