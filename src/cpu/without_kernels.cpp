// Stands in for the kernels and for what runs them. Plans are made for every instruction set with a name of
// its own, and nothing runs.
#include "core/status.h"
#include "cpu/backend.h"

namespace logitless::cpu {

std::span<const Kernels> fp32_kernels() {
  static constexpr Kernels kKernels[] = {{kAvx512}, {kAvx2}, {kNeon}};
  return kKernels;
}

const Kernels* bf16_pair_kernels() {
  static constexpr Kernels kKernels{kAvx512Bf16};
  return &kKernels;
}

void CpuPlan::run(const Buffers& /*buffers*/, Workspace /*workspace*/, void* /*stream*/,
                  const Communicator* /*group*/) const {
  throw Error(Status::kUnsupported, "this build has no kernels");
}

uint64_t candidates_bytes(const Candidates& /*candidates*/, const BackendOptions& /*options*/) {
  return 0;
}
void candidates(const Candidates& /*candidates*/, const BackendOptions& /*options*/, Workspace /*workspace*/,
                void* /*stream*/) {
  throw Error(Status::kUnsupported, "this build has no kernels");
}

}  // namespace logitless::cpu
