#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(gradient_general_bf16, Epilogue::kGradient, DType::kBF16, /*general=*/true)
