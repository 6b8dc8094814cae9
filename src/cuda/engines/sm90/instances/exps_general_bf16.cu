#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(exps_general_bf16, Epilogue::kExps, DType::kBF16, /*general=*/true)
