// In place of mma_launch.cu where there is no CUDA compiler: no plan of such a build is run.
#include "core/status.h"
#include "cuda/engines/mma/launch.h"

namespace logitless::cuda::mma {

void launch_logits(const LogitsArgs& /*args*/, const Queue& /*queue*/) {
  throw Error(Status::kUnsupported, "this build has no CUDA kernels");
}

}  // namespace logitless::cuda::mma
