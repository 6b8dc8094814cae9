#pragma once
#include "cuda/engines/sm90/instances/instances.h"
#include "cuda/engines/sm90/logits_kernel.cuh"

// Defines one function of instances.h and its kernels, two where the epilogue has cooperative tiles. A macro:
// the compiler's host stubs cannot name a class-type template argument such as an Instance.
#define LOGITLESS_DEFINE_LOGITS_KERNEL(name, epilogue, dtype, general)                                      \
  namespace logitless::cuda::sm90 {                                                                         \
  namespace {                                                                                               \
  template <bool kCooperative>                                                                              \
  __global__ void __launch_bounds__(kThreads, 1) name                                                       \
      ##_kernel(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap classifier, \
                const __grid_constant__ CUtensorMap out,                                                    \
                const __grid_constant__ KernelParams<ArgsOf<epilogue>> params) {                            \
    constexpr Instance kInstance{config_of(epilogue, kCooperative), epilogue, dtype, general};              \
    run_logits_kernel<kInstance>(hidden, classifier, out, params);                                          \
  }                                                                                                         \
  template <bool kMayCooperate>                                                                             \
  const void* pick_##name(bool cooperative) {                                                               \
    if constexpr (kMayCooperate) {                                                                          \
      if (cooperative) return reinterpret_cast<const void*>(&name##_kernel<kMayCooperate>);                 \
    }                                                                                                       \
    return reinterpret_cast<const void*>(&name##_kernel<false>);                                            \
  }                                                                                                         \
  }                                                                                                         \
  const void* name(bool cooperative) {                                                                      \
    return pick_##name<may_cooperate(epilogue)>(cooperative);                                               \
  }                                                                                                         \
  }
