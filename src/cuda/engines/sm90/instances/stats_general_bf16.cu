#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(stats_general_bf16, Epilogue::kStats, DType::kBF16, /*general=*/true)
