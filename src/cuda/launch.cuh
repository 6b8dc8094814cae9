#pragma once
// Launches that overlap (programmatic dependent launch): a kernel is brought up while the kernel before it in
// the stream ends, and waits on the device until that is done and all it wrote can be seen.
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/check.h"
#include "cuda/launch.h"
#include "cuda/queue.h"

namespace logitless::cuda {

// false: every kernel is brought up when the one before it is done, as what overlapping gains, on streams
// other than the null stream, has not been measured. A kernel must not read by __ldg what the one before it
// writes.
inline constexpr bool kOverlapsLaunches = false;

// The first thing that every thread of such a kernel does, also of one with nothing to do: so a kernel that
// is done says that all before it are.
__device__ __forceinline__ void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kOverlapsLaunches) cudaGridDependencySynchronize();
#endif
}

// Lets such a kernel behind this one come up when all blocks have begun; it waits for their end all the same.
__device__ __forceinline__ void let_next_come_up() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kOverlapsLaunches) cudaTriggerProgrammaticLaunchCompletion();
#endif
}

inline bool may_overlap(After after, const Queue& queue) {
  return kOverlapsLaunches && after == After::kKernel && queue.may_overlap();
}

template <class... Parameters>
void launch_after(After after, const char* name, void (*kernel)(Parameters...), unsigned blocks, int threads,
                  const Queue& queue, const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.attrs = &overlap;
  launch.numAttrs = may_overlap(after, queue) ? 1 : 0;
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  queue.launch(launch, kernel_pointer(kernel), pointers);
  check_launch(name);
}

}  // namespace logitless::cuda
