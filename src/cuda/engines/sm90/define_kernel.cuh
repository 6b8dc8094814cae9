#pragma once
#include "cuda/engines/sm90/logits_kernel.cuh"

// Defines one kernel of instances.def, or two if the epilogue has cooperative tiles, and the function that
// returns its address. This is a macro because the compiler's host stubs cannot name a class-type template
// argument such as an Instance.
#define LOGITLESS_INSTANCE(name, epilogue, dtype, general)                                              \
  namespace logitless::cuda::sm90 {                                                                     \
  namespace {                                                                                           \
  template <bool kCooperative>                                                                          \
  __global__ void __launch_bounds__(kThreads, 1) name                                                   \
      ##_kernel(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap weight, \
                const __grid_constant__ CUtensorMap out,                                                \
                const __grid_constant__ KernelParams<ArgsOf<Epilogue::epilogue>> params) {              \
    constexpr Instance kInstance{config_of(Epilogue::epilogue, kCooperative), Epilogue::epilogue,       \
                                 DType::dtype, general};                                                \
    run_logits_kernel<kInstance>(hidden, weight, out, params);                                          \
  }                                                                                                     \
  }                                                                                                     \
  const void* name(bool cooperative) {                                                                  \
    constexpr bool kMayCooperate = may_cooperate(Epilogue::epilogue, DType::dtype);                     \
    return cooperative ? reinterpret_cast<const void*>(&name##_kernel<kMayCooperate>)                   \
                       : reinterpret_cast<const void*>(&name##_kernel<false>);                          \
  }                                                                                                     \
  }
