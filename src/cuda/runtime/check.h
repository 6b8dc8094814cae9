#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"

namespace logitless::cuda {

// Turns a failed call into the library's error; `what` names the call or kernel.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  const Status status = error == cudaErrorMemoryAllocation ? Status::kOutOfMemory : Status::kInternal;
  throw Error(status, std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

}  // namespace logitless::cuda
