#pragma once
#include <cstdint>

#include "cuda/engines/fused/epilogue_exps.cuh"
#include "cuda/engines/fused/epilogue_gradient.cuh"
#include "cuda/engines/fused/epilogue_stats.cuh"
#include "cuda/engines/fused/epilogue_thin.cuh"
#include "cuda/engines/fused/epilogue_top.cuh"
#include "cuda/engines/mma/exchange.cuh"
#include "cuda/engines/mma/loader.cuh"
#include "cuda/engines/mma/mma_config.h"
#include "cuda/engines/mma/products.cuh"
#include "cuda/engines/mma/ring.cuh"
#include "cuda/engines/mma/store_tile.cuh"
#include "cuda/launch.cuh"

// One persistent kernel: logits of tiles of 256 x 192 by mma.sync, each tile handed to an epilogue while it
// is in registers. All 8 warps copy, multiply and work on the epilogue; the copies of the tile after are
// under way during an epilogue.
namespace headroom::cuda::mma {

template <Instance kInstance, class View>
__device__ __forceinline__ void run_epilogue(Accumulators& acc, const View& view,
                                             const MmaParams<ArgsOf<kInstance.epilogue>>& params,
                                             uint32_t pass) {
  const LogitsProduct& product = params.product;
  if constexpr (kInstance.epilogue == Epilogue::kStats) {
    stats_epilogue<kInstance.general>(acc, view, product, params.args, params.exponent_scale);
  } else if constexpr (kInstance.epilogue == Epilogue::kThin) {
    thin_epilogue<kInstance.general>(acc, view, product, params.args, params.exponent_scale);
  } else if constexpr (kInstance.epilogue == Epilogue::kTop) {
    top_epilogue(acc, view, product, params.args, params.exponent_scale);
  } else if constexpr (kInstance.epilogue == Epilogue::kExps) {
    exps_epilogue<kInstance.general>(acc, view, params);
    if (view.first_column() >= static_cast<int>(params.args.exps.columns)) return;
    store_tile<DType::kBF16, kKeptExponent>(acc, view, params.args.exps, static_cast<int>(product.rows),
                                            pass);
  } else {
    gradient_epilogue<kInstance.general>(acc, view, params);
    store_tile<kInstance.dtype, 0>(acc, view, params.args.dz, static_cast<int>(product.rows), pass);
  }
}

// Stages around the ring: the one before the one that is read, that one, and the next.
struct Stages {
  uint32_t before, now, next;

  // last: the number of the one that was read last.
  __device__ __forceinline__ Stages(const SharedMemory& shared, int last)
      : before(SharedMemory::stage(last)), now(after(shared, before)), next(after(shared, now)) {}
  __device__ __forceinline__ void advance(const SharedMemory& shared) {
    before = now;
    now = next;
    next = after(shared, now);
  }

 private:
  __device__ static __forceinline__ uint32_t after(const SharedMemory& shared, uint32_t stage) {
    return stage + kStageBytes == SharedMemory::stage(shared.stages) ? SharedMemory::stage(0)
                                                                     : stage + kStageBytes;
  }
};

// Products of a tile of which all warps have a part; the copies of stages after are started meanwhile.
template <Instance kInstance>
__device__ __forceinline__ void multiply_tile(Accumulators& acc, const SharedMemory& shared,
                                              const MmaParams<ArgsOf<kInstance.epilogue>>& params,
                                              Stages stages, Loader loader) {
  Fragments fragments;
  fragments.load(StageOffsets::load(shared), stages.now, 0);
  for (int k = 0; k < params.depth_blocks; ++k) {
    const StageOffsets at = StageOffsets::load(shared);
    Loader::Source from;
    multiply_step<kInstance.dtype>(acc, fragments, at, stages.now, 0, [&](int i) {
      if (i == kPieces - 2) from = loader.source(shared, params);
    });
    fragments.load(at, stages.now, 1);
    // In the middle of a stage, with operands at hand, for the one behind it; the one before it has been
    // read then.
    wait_for_stage<2>(params.stages);
    multiply_step<kInstance.dtype>(acc, fragments, at, stages.now, 1, [&](int i) {
      if (i == 0) loader.copy_hidden(params, from, stages.before, at.copied);
      if (i == 2) loader.copy_classifier(shared, params, from, stages.before, at.copied);
    });
    fragments.load(at, stages.next, 0);  // of another tile, after the last
    stages.advance(shared);
  }
}

// Of a tile of which some warps have none: barriers are where all of them come to the same one.
template <Instance kInstance>
__device__ __forceinline__ void multiply_part_of_tile(Accumulators& acc, const SharedMemory& shared,
                                                      const MmaParams<ArgsOf<kInstance.epilogue>>& params,
                                                      Stages stages, Loader loader, bool multiplies) {
  for (int k = 0; k < params.depth_blocks; ++k) {
    const StageOffsets at = StageOffsets::load(shared);
    for (int step = 0; multiplies && step < 2; ++step) {
      Fragments fragments;
      fragments.load(at, stages.now, step);
      multiply_step<kInstance.dtype>(acc, fragments, at, stages.now, step, [](int) {});
    }
    wait_for_stage<2>(params.stages);
    loader.copy_both(shared, params, stages.before, at.copied);
    stages.advance(shared);
  }
}

template <Instance kInstance>
__device__ __forceinline__ void compute_tiles(const SharedMemory& shared,
                                              const MmaParams<ArgsOf<kInstance.epilogue>>& params) {
  const LogitsProduct& product = params.product;
  const TileView<kLayout> view{shared.view()};
  if (warp_index() == 0) {
    for (int i = 0; i < params.ahead; ++i) find_origin(shared, params, i);
  }
  const StageOffsets at = StageOffsets::of_thread();
  at.store(shared);
  __syncthreads();
  Loader first = Loader::begin(shared, params);
  for (int i = 0; i + 1 < params.stages; ++i) first.copy_both(shared, params, shared.stage(i), at.copied);
  wait_for_stage<1>(params.stages);

  for (int i = 0; i < shared.tiles(); ++i) {
    if (warp_index() == 0) find_origin(shared, params, i + params.ahead);
    const int4 origin = shared.load_origin(i);
    view.store(origin.x + warp_index() / 4 * kWarpgroupRows, shared.load_active().rows, origin.y, origin.z);

    Accumulators acc;  // in here: nothing of the last tile's is to be kept in registers
    for_each(acc, [](float) { return 0.f; });
    // A pair without rows, or a warp without columns, leaves the products out.
    const bool is_active = row_block_active(product, view.first_row(), view.rows());
    const bool multiplies = is_active && origin.x + warp_index() / 2 * kPairRows < view.rows() &&
                            origin.y + (warp_index() & 1) * kWarpColumns < product.columns;
    // Found anew, not kept over epilogues: registers.
    const int next = i * params.depth_blocks + params.stages - 1;
    const Loader loader(next, params.depth_blocks);
    const Stages stages(shared, next % params.stages);
    if (__syncthreads_or(!multiplies) == 0) {
      multiply_tile<kInstance>(acc, shared, params, stages, loader);
    } else {
      multiply_part_of_tile<kInstance>(acc, shared, params, stages, loader, multiplies);
    }
    __syncthreads();  // the last stage has been read, and is room for what passes between warps
    if (!is_active) continue;
    const uint32_t pass = shared.stage((next + params.depth_blocks) % params.stages);
    exchange_halves(acc, pass);
    run_epilogue<kInstance>(acc, view, params, pass);
  }
  ptx::copy_async_wait<0>();
}

// The whole kernel; instances/define_mma_kernel.cuh makes __global__ functions of it.
template <Instance kInstance>
__device__ __forceinline__ void run_mma_kernel(const MmaParams<ArgsOf<kInstance.epilogue>>& params) {
  const SharedMemory shared{params.stages};
  if ((shared.stage(0) & 127) != 0) __trap();
  wait_for_kernels_before();
  if (warp_index() == 0) {
    const ActiveRows active = find_active_rows<kBlockRows>(params.product);
    const TileSchedule schedule(params.raster, active.units, params.column_tiles);
    if (lane_index() == 0) shared.store_active(active, schedule.tiles_of(static_cast<int>(blockIdx.x)));
  }
  __syncthreads();
  if (shared.tiles() > 0) compute_tiles<kInstance>(shared, params);
}

}  // namespace headroom::cuda::mma
