#include "cuda/engines/mma/instances/define_mma_kernel.cuh"
LOGITLESS_DEFINE_MMA_KERNEL(mma_gradient_general_bf16, Epilogue::kGradient, DType::kBF16, /*general=*/true)
