#include "cuda/engines/mma/instances/define_mma_kernel.cuh"
LOGITLESS_DEFINE_MMA_KERNEL(mma_stats_general_f16, Epilogue::kStats, DType::kF16, /*general=*/true)
