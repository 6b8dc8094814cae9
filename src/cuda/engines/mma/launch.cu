#include "cuda/engines/mma/launch.h"

#include <cuda_runtime.h>

#include <limits>

#include "core/status.h"
#include "cuda/engines/mma/ring.cuh"
#include "cuda/runtime/check.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda::mma {

// The kernels' addresses.
#define LOGITLESS_INSTANCE(name, ...) const void* name();
#include "cuda/engines/fused/instances.def"

namespace {

const void* find_kernel(const Instance& instance) {
#define LOGITLESS_INSTANCE(name, epilogue, dtype, general) \
  if (instance == Instance{Epilogue::epilogue, DType::dtype, general}) return name();
#include "cuda/engines/fused/instances.def"
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
        queue.launch("mma logits kernel", launch, kernel, arguments);
      },
      args.of_epilogue);
}

}  // namespace logitless::cuda::mma
