#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(thin_general_bf16, Epilogue::kThin, DType::kBF16, /*general=*/true)
