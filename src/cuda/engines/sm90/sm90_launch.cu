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

void check_slots(const LogitsProduct& product, const StatSlots& stats, const LogitsPlan& plan) {
  require(stats.sum == nullptr || (stats.stride >= product.rows && stats.slots >= 1),
          "at least one slot for all rows");
  require(
      !product.batch_invariant || (stats.slots >= plan.slots && product.column_offset % kTileColumns == 0),
      "a slot for each tile of columns, and windows of whole tiles");
  require(stats.argmax == nullptr || stats.max != nullptr, "argmax needs slots of maxima");
}

void check_statistics(const LogitsProduct& product, const StatSlots& stats, const LogitsPlan& plan) {
  require(stats.sum != nullptr && stats.max != nullptr, "slots of sums and maxima must be given");
  check_slots(product, stats, plan);
}

void check_epilogue(const LogitsProduct& product, const StatsArgs& args, const LogitsPlan& plan) {
  check_statistics(product, args.stats, plan);
}

void check_epilogue(const LogitsProduct& product, const ExpsArgs& args, const LogitsPlan& plan) {
  require(args.stats.sum != nullptr, "slots must be given");
  check_slots(product, args.stats, plan);
  require(args.anchor != nullptr, "anchors must be given");
  require(args.exps.columns <= product.columns, "more columns are stored than there are");
}

void check_epilogue(const LogitsProduct& product, const GradientArgs& args, const LogitsPlan& /*plan*/) {
  require(args.lse != nullptr && args.a != nullptr && args.g != nullptr, "lse, a and g must be given");
  require(args.dz.columns == product.columns, "dz is stored of all columns");
}

void check_epilogue(const LogitsProduct& product, const ThinArgs& args, const LogitsPlan& plan) {
  check_slots(product, args.stats, plan);
  require(args.anchor != nullptr, "anchors must be given");
  require(args.draws.elements != nullptr && (args.stats.sum == nullptr || args.stats.expected != nullptr),
          "lists, and slots of expected counts beside the sums', must be given");
}

void check_epilogue(const LogitsProduct& product, const TopArgs& args, const LogitsPlan& plan) {
  if (args.top.group_max != nullptr) return;
  check_statistics(product, args.stats, plan);
  require(args.top.threshold != nullptr && args.top.count != nullptr && args.top.listed != nullptr,
          "thresholds and lists, or room for maxima, must be given");
}

void check_arguments(const LogitsArgs& args, const LogitsPlan& plan) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
  require(supports(args), "operands must be 16-bit with rows aligned to 16 bytes");
  require(args.rows <= kMost && args.columns <= kMost && args.depth <= kMost, "sizes must be below 2^31");
  require(plan.units * ((args.columns + kTileColumns - 1) / kTileColumns) <= kMost, "more than 2^31 tiles");
  std::visit([&](const auto& of_epilogue) { check_epilogue(args, of_epilogue, plan); }, args.of_epilogue);
}

template <class Args>
KernelParams<Args> params_of(const LogitsProduct& product, const Args& args, const Raster& raster) {
  KernelParams<Args> params;
  params.product = product;
  params.args = args;
  params.exponent_scale = product.scale * 1.4426950408889634f;
  params.inverse_cap = inverse_softcap(product.softcap);
  params.depth_blocks = static_cast<int32_t>((product.depth + kBlockDepth - 1) / kBlockDepth);
  params.column_tiles = static_cast<int32_t>((product.columns + kTileColumns - 1) / kTileColumns);
  params.raster = raster;
  return params;
}

// Slots that sums may go to: as many as there are tiles where none are made, or each tile has its own.
int slots_of(const LogitsArgs& args) {
  const StatSlots* stats = stats_of(args);
  const bool any = stats == nullptr || stats->sum == nullptr || args.batch_invariant;
  return any ? std::numeric_limits<int>::max() : static_cast<int>(std::min<int64_t>(stats->slots, 1024));
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

  const int slots = slots_of(args);
  Raster raster = make_raster(plan.clusters, config.turns(), plan.preferred_units, slots);
  require(plan.units < raster.tail_units + raster.main.units || raster.main.slots <= slots, "too few slots");
  if (args.batch_invariant) raster.first_slot = static_cast<int32_t>(args.column_offset / kTileColumns);

  const CUtensorMap hidden =
      make_tensor_map(args.hidden, args.dtype, args.rows, args.depth, args.hidden_stride, config.tile_rows());
  const CUtensorMap classifier = make_tensor_map(args.classifier, args.dtype, args.columns, args.depth,
                                                 args.classifier_stride, kTileColumns / kClusterBlocks);
  const StoredColumns* stored = stored_by(args);
  const CUtensorMap out = stored == nullptr || stored->columns == 0
                              ? hidden
                              : make_tensor_map(stored->data, args.dtype, args.rows, stored->columns,
                                                stored->stride, kWarpgroupRows);

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
  std::visit(
      [&](const auto& of_epilogue) {
        auto params = params_of(args, of_epilogue, raster);
        void* arguments[] = {const_cast<CUtensorMap*>(&hidden), const_cast<CUtensorMap*>(&classifier),
                             const_cast<CUtensorMap*>(&out), &params};
        queue.launch(launch, kernel, arguments);
      },
      args.of_epilogue);
  check_launch("logits kernel");
}

}  // namespace headroom::cuda::sm90
