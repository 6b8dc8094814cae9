#pragma once

// The compiled kernels, one a file: <epilogue>_<plain or general>_<dtype>, as the address that a launch
// takes.
namespace headroom::cuda::sm90 {

const void* stats_plain_bf16();
const void* stats_general_bf16();
const void* stats_general_f16();
const void* exps_plain_bf16();
const void* exps_general_bf16();
const void* gradient_plain_bf16();
const void* gradient_general_bf16();
const void* gradient_general_f16();

}  // namespace headroom::cuda::sm90
