#include "cuda/engines/sm90/sm90_launch.h"

#include <cuda_runtime.h>

#include <limits>

#include "core/status.h"
#include "cuda/check.h"
#include "cuda/device.h"
#include "cuda/engines/sm90/instances/instances.h"
#include "cuda/engines/sm90/kernel_params.cuh"
#include "cuda/engines/sm90/tensor_map.h"
#include "cuda/launch.cuh"
#include "cuda/softcap.h"

namespace headroom::cuda::sm90 {
namespace {

const void* find_kernel(const Instance& instance) {
  const bool general = instance.general;
  const bool cooperative = instance.config.cooperative;
  if (instance.dtype == DType::kBF16) {
    switch (instance.epilogue) {
      case Epilogue::kStats:
        return general ? stats_general_bf16(cooperative) : stats_plain_bf16(cooperative);
      case Epilogue::kExps:
        return general ? exps_general_bf16(cooperative) : exps_plain_bf16(cooperative);
      case Epilogue::kGradient:
        return general ? gradient_general_bf16(cooperative) : gradient_plain_bf16(cooperative);
      case Epilogue::kThin:
        return general ? thin_general_bf16(cooperative) : thin_plain_bf16(cooperative);
      case Epilogue::kTop:
        return top_general_bf16(cooperative);
    }
  }
  if (instance.dtype == DType::kF16 && instance.epilogue == Epilogue::kStats)
    return stats_general_f16(cooperative);
  if (instance.dtype == DType::kF16 && instance.epilogue == Epilogue::kGradient)
    return gradient_general_f16(cooperative);
  if (instance.dtype == DType::kF16 && instance.epilogue == Epilogue::kThin)
    return thin_general_f16(cooperative);
  if (instance.dtype == DType::kF16 && instance.epilogue == Epilogue::kTop)
    return top_general_f16(cooperative);
  throw Error(Status::kInternal, "sm90: no kernel for this data type and epilogue");
}

void require(bool condition, const char* what) {
  if (!condition) throw Error(Status::kInternal, std::string("sm90 logits: ") + what);
}

void check_arguments(const LogitsArgs& args, const LogitsPlan& plan) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
  require(supports(args), "operands must be 16-bit with rows aligned to 16 bytes");
  require(args.rows <= kMost && args.columns <= kMost && args.depth <= kMost, "sizes must be below 2^31");
  require(plan.units * ((args.columns + kTileColumns - 1) / kTileColumns) <= kMost, "more than 2^31 tiles");
  if (args.epilogue == Epilogue::kGradient) {
    require(args.lse != nullptr && args.a != nullptr && args.g != nullptr, "lse, a and g must be given");
  } else {
    require(args.epilogue == Epilogue::kThin || args.stats.sum != nullptr || args.top.group_max != nullptr,
            "slots must be given");
    require(args.stats.sum == nullptr || (args.stats.stride >= args.rows && args.stats.slots >= 1),
            "at least one slot for all rows");
  }
  require(args.epilogue == Epilogue::kGradient
              ? args.out_columns == args.columns
              : args.out_columns <= (stores(args.epilogue) ? args.columns : 0),
          "columns that are stored: all of kGradient, some of kExps, none of others");
  require(!args.batch_invariant || args.epilogue == Epilogue::kGradient ||
              (args.stats.slots >= plan.slots && args.column_offset % kTileColumns == 0),
          "a slot for each tile of columns, and windows of whole tiles");
  const bool makes_stats = args.epilogue == Epilogue::kStats || args.epilogue == Epilogue::kTop;
  require(!makes_stats || args.stats.max != nullptr || args.top.group_max != nullptr,
          "slots of maxima must be given");
  require(makes_stats || args.epilogue == Epilogue::kGradient || args.anchor != nullptr,
          "anchors must be given");
  require(args.epilogue != Epilogue::kTop || args.top.group_max != nullptr ||
              (args.top.threshold != nullptr && args.top.count != nullptr && args.top.listed != nullptr),
          "thresholds and lists, or room for maxima, must be given");
  require(args.epilogue != Epilogue::kThin || (args.draws.elements != nullptr &&
                                               (args.stats.sum == nullptr || args.stats.expected != nullptr)),
          "lists, and slots of expected counts beside the sums', must be given");
  require(args.stats.argmax == nullptr || args.stats.max != nullptr, "argmax needs slots of maxima");
}

}  // namespace

void launch_logits(const LogitsArgs& args, const Queue& queue, After after) {
  if (args.rows <= 0 || args.columns <= 0 || args.depth <= 0) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const bool any_fewer = args.row_count != nullptr || args.row_block_active != nullptr;
  const LogitsPlan plan = plan_logits(args, query_device(device).processors, any_fewer);
  check_arguments(args, plan);
  const Instance& instance = plan.instance;
  const Config& config = instance.config;

  KernelParams params;
  params.args = args;
  params.exponent_scale = args.scale * 1.4426950408889634f;
  params.inverse_cap = inverse_softcap(args.softcap);
  params.depth_blocks = static_cast<int32_t>((args.depth + kBlockDepth - 1) / kBlockDepth);
  params.column_tiles = static_cast<int32_t>((args.columns + kTileColumns - 1) / kTileColumns);
  const bool any_slots = args.stats.sum == nullptr || args.batch_invariant;
  const int slots = any_slots ? std::numeric_limits<int>::max()
                              : static_cast<int>(std::min<int64_t>(args.stats.slots, 1024));
  params.raster = make_raster(plan.clusters, config.turns(), plan.preferred_units, slots);
  require(
      plan.units < params.raster.tail_units + params.raster.main.units || params.raster.main.slots <= slots,
      "too few slots");
  if (args.batch_invariant)
    params.raster.first_slot = static_cast<int32_t>(args.column_offset / kTileColumns);

  const CUtensorMap hidden =
      make_tensor_map(args.hidden, args.dtype, args.rows, args.depth, args.hidden_stride, config.tile_rows());
  const CUtensorMap classifier = make_tensor_map(args.classifier, args.dtype, args.columns, args.depth,
                                                 args.classifier_stride, kTileColumns / kClusterBlocks);
  const CUtensorMap out = args.out_columns == 0
                              ? hidden
                              : make_tensor_map(args.out, args.dtype, args.rows, args.out_columns,
                                                args.out_stride, kWarpgroupRows);

  const void* kernel = find_kernel(instance);
  allow_shared_memory(kernel, device, config.shared_bytes());
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kClusterBlocks;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(plan.clusters * kClusterBlocks));
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes());
  launch.attrs = attributes;
  launch.numAttrs = may_overlap(after, queue) ? 2 : 1;
  void* arguments[] = {const_cast<CUtensorMap*>(&hidden), const_cast<CUtensorMap*>(&classifier),
                       const_cast<CUtensorMap*>(&out), &params};
  queue.launch(launch, kernel, arguments);
  check_launch("logits kernel");
}

}  // namespace headroom::cuda::sm90
