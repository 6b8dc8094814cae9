#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(top_general_bf16, Epilogue::kTop, DType::kBF16, /*general=*/true)
