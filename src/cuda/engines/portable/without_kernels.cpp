// In place of portable_launch.cu where there is no CUDA compiler: no plan of such a build is run.
#include "core/status.h"
#include "cuda/engines/portable/launch.h"

namespace logitless::cuda::portable {

void launch_logits(const LogitsArgs& /*args*/, const LogitsScratch& /*scratch*/, const Queue& /*queue*/) {
  throw Error(Status::kUnsupported, "this build has no CUDA kernels");
}

}  // namespace logitless::cuda::portable
