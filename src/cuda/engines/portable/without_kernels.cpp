// In place of portable_launch.cu where there is no CUDA compiler: no plan of such a build is run.
#include "core/status.h"
#include "cuda/engines/portable/launch.h"

namespace logitless::cuda::portable {

template <class Real>
void launch_logits(const LogitsArgsOf<Real>& /*args*/, const LogitsScratch& /*scratch*/,
                   const Queue& /*queue*/) {
  throw Error(Status::kUnsupported, "this build has no CUDA kernels");
}
template void launch_logits(const LogitsArgs&, const LogitsScratch&, const Queue&);
template void launch_logits(const LogitsArgsOf<double>&, const LogitsScratch&, const Queue&);

}  // namespace logitless::cuda::portable
