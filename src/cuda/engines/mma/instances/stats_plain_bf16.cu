#include "cuda/engines/mma/instances/define_mma_kernel.cuh"
LOGITLESS_DEFINE_MMA_KERNEL(mma_stats_plain_bf16, Epilogue::kStats, DType::kBF16, /*general=*/false)
