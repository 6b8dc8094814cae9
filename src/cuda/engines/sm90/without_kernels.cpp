// In place of sm90_launch.cu where there is no CUDA compiler: no plan of such a build is run.
#include "core/status.h"
#include "cuda/engines/sm90/launch.h"

namespace logitless::cuda::sm90 {

void launch_logits(const LogitsArgs& /*args*/, const Queue& /*queue*/) {
  throw Error(Status::kUnsupported, "this build has no CUDA kernels");
}

}  // namespace logitless::cuda::sm90
