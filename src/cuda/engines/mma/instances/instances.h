#pragma once

// The compiled kernels, a file for each mma_<epilogue>_<plain or general>_<dtype>: the address that a launch
// takes.
namespace logitless::cuda::mma {

const void* mma_stats_plain_bf16();
const void* mma_stats_general_bf16();
const void* mma_stats_general_f16();
const void* mma_exps_plain_bf16();
const void* mma_exps_general_bf16();
const void* mma_gradient_plain_bf16();
const void* mma_gradient_general_bf16();
const void* mma_gradient_general_f16();
const void* mma_thin_plain_bf16();
const void* mma_thin_general_bf16();
const void* mma_thin_general_f16();
const void* mma_top_general_bf16();
const void* mma_top_general_f16();

}  // namespace logitless::cuda::mma
