#include "cuda/sm90/instances/instances.h"
#include "cuda/sm90/logits_kernel.cuh"

namespace headroom::cuda::sm90 {
namespace {

template <bool kCooperative>
__global__ void __launch_bounds__(kThreads, 1)
    thin_general_bf16_kernel(const __grid_constant__ CUtensorMap hidden,
                             const __grid_constant__ CUtensorMap classifier,
                             const __grid_constant__ CUtensorMap out,
                             const __grid_constant__ KernelParams params) {
  constexpr Instance kInstance{config_of(Epilogue::kThin, kCooperative), Epilogue::kThin, DType::kBF16,
                               /*general=*/true};
  run_logits_kernel<kInstance>(hidden, classifier, out, params);
}

}  // namespace

const void* thin_general_bf16(bool cooperative) {
  return cooperative ? reinterpret_cast<const void*>(&thin_general_bf16_kernel<true>)
                     : reinterpret_cast<const void*>(&thin_general_bf16_kernel<false>);
}

}  // namespace headroom::cuda::sm90
