#pragma once

// The compiled kernels, a file for each <epilogue>_<plain or general>_<dtype>: the address that a launch
// takes, of the cooperative or the ping-pong one.
namespace logitless::cuda::sm90 {

const void* stats_plain_bf16(bool cooperative);
const void* stats_general_bf16(bool cooperative);
const void* stats_general_f16(bool cooperative);
const void* exps_plain_bf16(bool cooperative);
const void* exps_general_bf16(bool cooperative);
const void* gradient_plain_bf16(bool cooperative);
const void* gradient_general_bf16(bool cooperative);
const void* gradient_general_f16(bool cooperative);
const void* thin_plain_bf16(bool cooperative);
const void* thin_general_bf16(bool cooperative);
const void* thin_general_f16(bool cooperative);
const void* top_general_bf16(bool cooperative);
const void* top_general_f16(bool cooperative);

}  // namespace logitless::cuda::sm90
