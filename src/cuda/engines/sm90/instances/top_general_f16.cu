#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(top_general_f16, Epilogue::kTop, DType::kF16, /*general=*/true)
