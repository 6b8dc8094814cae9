#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(stats_general_f16, Epilogue::kStats, DType::kF16, /*general=*/true)
