#include "cuda/engines/sm90/instances/define_kernel.cuh"
LOGITLESS_DEFINE_LOGITS_KERNEL(thin_general_f16, Epilogue::kThin, DType::kF16, /*general=*/true)
