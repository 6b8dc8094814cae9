#include "cuda/engines/mma/instances/define_mma_kernel.cuh"
LOGITLESS_DEFINE_MMA_KERNEL(mma_exps_plain_bf16, Epilogue::kExps, DType::kBF16, /*general=*/false)
