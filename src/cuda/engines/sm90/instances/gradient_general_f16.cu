#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(gradient_general_f16, Epilogue::kGradient, DType::kF16, /*general=*/true)
