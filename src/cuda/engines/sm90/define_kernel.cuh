#pragma once
#include "cuda/engines/sm90/logits_kernel.cuh"

// Defines the kernels of one line of instances.def, one for each kind of tiles that the epilogue has, and the
// function that returns their addresses. This is a macro because the compiler's host stubs cannot name a
// class-type template argument such as an Instance.
#define LOGITLESS_INSTANCE(name, epilogue, dtype, general)                                                  \
  namespace logitless::cuda::sm90 {                                                                         \
  namespace {                                                                                               \
  template <Tiles kTiles>                                                                                   \
  __global__ void __launch_bounds__(kThreads, 1) name                                                       \
      ##_kernel(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap weight,     \
                const __grid_constant__ CUtensorMap out,                                                    \
                const __grid_constant__ KernelParams<ArgsOf<Epilogue::epilogue>> params) {                  \
    constexpr Instance kInstance{config_of(kTiles, Epilogue::epilogue), Epilogue::epilogue, DType::dtype,   \
                                 general};                                                                  \
    run_logits_kernel<kInstance>(hidden, weight, out, params);                                              \
  }                                                                                                         \
  template <Tiles kTiles>                                                                                   \
  const void* name##_of() {                                                                                 \
    if constexpr (has_tiles(kTiles, Epilogue::epilogue, DType::dtype)) {                                    \
      return reinterpret_cast<const void*>(&name##_kernel<kTiles>);                                         \
    } else {                                                                                                \
      return nullptr;                                                                                       \
    }                                                                                                       \
  }                                                                                                         \
  }                                                                                                         \
  const void* name(Tiles tiles) {                                                                           \
    if (tiles == Tiles::kFewRows) return name##_of<Tiles::kFewRows>();                                      \
    return tiles == Tiles::kCooperative ? name##_of<Tiles::kCooperative>() : name##_of<Tiles::kPingPong>(); \
  }                                                                                                         \
  }
