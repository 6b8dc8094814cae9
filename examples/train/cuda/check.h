#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace logitless::train::cuda {

// Turns a failed call of CUDA's into an exception; `what` names the call or kernel.
inline void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would report it
  throw std::runtime_error("CUDA: " + what + ": " + cudaGetErrorString(error));
}

}  // namespace logitless::train::cuda
