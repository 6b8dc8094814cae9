#pragma once
#include "cuda/engines/mma/instances/instances.h"
#include "cuda/engines/mma/kernel.cuh"
#include "cuda/runtime/kernel_pointer.h"

// Defines one function of mma_instances.h and its kernel.
#define LOGITLESS_DEFINE_MMA_KERNEL(name, epilogue, dtype, general)           \
  namespace logitless::cuda::mma {                                            \
  namespace {                                                                 \
  __global__ void __launch_bounds__(kThreads, 1) name                         \
      ##_kernel(const __grid_constant__ MmaParams<ArgsOf<epilogue>> params) { \
    run_mma_kernel<Instance{epilogue, dtype, general}>(params);               \
  }                                                                           \
  }                                                                           \
  const void* name() {                                                        \
    return kernel_pointer(name##_kernel);                                     \
  }                                                                           \
  }
