#include "cuda/engines/sm90/launch.h"

#include <cuda_runtime.h>

#include "core/status.h"
#include "cuda/engines/fused/args.h"
#include "cuda/engines/fused/kernel_params.cuh"
#include "cuda/engines/sm90/tensor_map.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda::sm90 {

// The kernels' addresses; null if the epilogue has no such tiles.
#define LOGITLESS_INSTANCE(name, ...) const void* name(Tiles tiles);
#include "cuda/engines/sm90/instances.def"

namespace {

const void* find_kernel(const Instance& i) {
#define LOGITLESS_INSTANCE(name, of_epilogue, of_dtype, is_general)                                     \
  if (i.epilogue == Epilogue::of_epilogue && i.dtype == DType::of_dtype && i.general == (is_general)) { \
    return name(i.config.tiles);                                                                        \
  }
#include "cuda/engines/sm90/instances.def"
  throw Error(Status::kInternal, "sm90: no kernel for this data type and epilogue");
}

}  // namespace

void launch_logits(const LogitsArgs& args, const Queue& queue) {
  if (args.rows <= 0 || args.columns <= 0 || args.depth <= 0) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const bool any_fewer = args.row_count != nullptr || args.row_block_active != nullptr;
  const LogitsPlan plan = plan_logits(args, query_device(device).processors, any_fewer);
  const Instance& instance = plan.instance;
  const Config& config = instance.config;
  const Raster raster = checked_raster(args, plan.tiling, "sm90");

  const int copied_rows = config.has_few_rows() ? copied_few_rows(args.rows) : config.loaded_rows();
  const CUtensorMap hidden =
      make_tensor_map(args.hidden, args.dtype, args.rows, args.depth, args.hidden_stride, copied_rows);
  const CUtensorMap weight = make_tensor_map(args.weight, args.dtype, args.columns, args.depth,
                                             args.weight_stride, kTileColumns / config.cluster_blocks());
  const StoredColumns* stored = stored_by(args);
  const CUtensorMap out = stored == nullptr || stored->columns == 0
                              ? hidden
                              : make_tensor_map(stored->data, stored_dtype(args.dtype), args.rows,
                                                stored->columns, stored->stride, kWarpgroupRows);

  const void* kernel = find_kernel(instance);
  allow_shared_memory(kernel, device, config.shared_bytes());
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = config.cluster_blocks();
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(plan.tiling.workers * config.cluster_blocks()));
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes());
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  std::visit(
      [&](const auto& of_epilogue) {
        auto params = params_of(args, of_epilogue, raster, block_depth(args.dtype));
        void* arguments[] = {const_cast<CUtensorMap*>(&hidden), const_cast<CUtensorMap*>(&weight),
                             const_cast<CUtensorMap*>(&out), &params};
        queue.launch("logits kernel", launch, kernel, arguments);
      },
      args.of_epilogue);
}

}  // namespace logitless::cuda::sm90
