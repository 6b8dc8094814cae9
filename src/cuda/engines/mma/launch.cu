#include "cuda/engines/mma/launch.h"

#include <cuda_runtime.h>

#include <limits>

#include "core/status.h"
#include "cuda/engines/mma/instances/instances.h"
#include "cuda/engines/mma/ring.cuh"
#include "cuda/runtime/check.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda::mma {
namespace {

const void* find_kernel(const Instance& instance) {
  const bool general = instance.general;
  const bool is_bf16 = instance.dtype == DType::kBF16;
  switch (instance.epilogue) {
    case Epilogue::kStats:
      if (!is_bf16) return mma_stats_general_f16();
      return general ? mma_stats_general_bf16() : mma_stats_plain_bf16();
    case Epilogue::kExps:
      if (!is_bf16) break;
      return general ? mma_exps_general_bf16() : mma_exps_plain_bf16();
    case Epilogue::kGradient:
      if (!is_bf16) return mma_gradient_general_f16();
      return general ? mma_gradient_general_bf16() : mma_gradient_plain_bf16();
    case Epilogue::kThin:
      if (!is_bf16) return mma_thin_general_f16();
      return general ? mma_thin_general_bf16() : mma_thin_plain_bf16();
    case Epilogue::kTop:
      return is_bf16 ? mma_top_general_bf16() : mma_top_general_f16();
  }
  throw Error(Status::kInternal, "mma: no kernel for this data type and epilogue");
}

}  // namespace

void launch_logits(const LogitsArgs& args, const Queue& queue) {
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  launch_logits(args, query_device(current), queue);
}

void launch_logits(const LogitsArgs& args, const Device& device, const Queue& queue) {
  if (args.rows <= 0 || args.columns <= 0 || args.depth <= 0) return;
  const bool any_fewer = args.row_count != nullptr || args.row_block_active != nullptr;
  const LogitsPlan plan = plan_logits(args, device, any_fewer);
  if (plan.stages == 0) throw Error(Status::kInternal, "mma logits: too little shared memory");
  const Raster raster = checked_raster(args, plan.tiling, "mma");
  // A block counts the stages of all its tiles in 32 bits.
  const int64_t tiles = plan.tiling.units * tiles_of_columns(args.columns) / plan.tiling.workers + 2;
  if (tiles * (args.depth / kBlockDepth + 1) > std::numeric_limits<int32_t>::max()) {
    throw Error(Status::kInternal, "mma logits: more than 2^31 blocks of depth for a processor");
  }

  const void* kernel = find_kernel(plan.instance);
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  allow_shared_memory(kernel, current, shared_bytes(stages_of(query_device(current).shared_bytes)));
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(plan.tiling.workers));
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = static_cast<size_t>(shared_bytes(plan.stages));
  std::visit(
      [&](const auto& of_epilogue) {
        MmaParams<std::decay_t<decltype(of_epilogue)>> params{
            params_of(args, of_epilogue, raster, kBlockDepth)};
        params.stages = plan.stages;
        params.ahead = (plan.stages - 1) / params.depth_blocks + 2;
        void* arguments[] = {&params};
        queue.launch(launch, kernel, arguments);
      },
      args.of_epilogue);
  check_launch("mma logits kernel");
}

}  // namespace logitless::cuda::mma
