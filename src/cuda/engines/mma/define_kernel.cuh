#pragma once
#include "cuda/engines/mma/kernel.cuh"
#include "cuda/runtime/kernel_pointer.h"

// Defines one kernel of instances.def and the function that returns its address.
#define LOGITLESS_INSTANCE(name, epilogue, dtype, general)                              \
  namespace logitless::cuda::mma {                                                      \
  namespace {                                                                           \
  __global__ void __launch_bounds__(kThreads, 1) mma_##name                             \
      ##_kernel(const __grid_constant__ MmaParams<ArgsOf<Epilogue::epilogue>> params) { \
    run_mma_kernel<Instance{Epilogue::epilogue, DType::dtype, general}>(params);        \
  }                                                                                     \
  }                                                                                     \
  const void* name() {                                                                  \
    return kernel_pointer(mma_##name##_kernel);                                         \
  }                                                                                     \
  }
