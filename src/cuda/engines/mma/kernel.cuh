#pragma once
#include <cstdint>

#include "cuda/engines/fused/epilogue_draw.cuh"
#include "cuda/engines/fused/epilogue_exp_logits.cuh"
#include "cuda/engines/fused/epilogue_gradient.cuh"
#include "cuda/engines/fused/epilogue_sample.cuh"
#include "cuda/engines/fused/epilogue_stats.cuh"
#include "cuda/engines/fused/epilogue_top.cuh"
#include "cuda/engines/mma/config.h"
#include "cuda/engines/mma/exchange.cuh"
#include "cuda/engines/mma/loader.cuh"
#include "cuda/engines/mma/products.cuh"
#include "cuda/engines/mma/ring.cuh"
#include "cuda/engines/mma/store_tile.cuh"

// One persistent kernel: logits of tiles of 256 x 192 by mma.sync, each tile handed to an epilogue while it
// is in registers. All 8 warps copy, multiply and work on the epilogue. Copies of the next tile run during an
// epilogue.
namespace logitless::cuda::mma {

template <Instance kInstance, class View>
__device__ __forceinline__ void run_epilogue(Accumulators& acc, const View& view,
                                             const MmaParams<ArgsOf<kInstance.epilogue>>& params,
                                             uint32_t pass) {
  const LogitsProduct& product = params.product;
  if constexpr (kInstance.epilogue == Epilogue::kStats) {
    stats_epilogue<kInstance.general>(acc, view, product, params.args, params.exponent_scale);
  } else if constexpr (kInstance.epilogue == Epilogue::kDraw) {
    draw_epilogue<kInstance.general>(acc, view, product, params.args, params.exponent_scale);
  } else if constexpr (kInstance.epilogue == Epilogue::kTop) {
    top_epilogue(acc, view, product, params.args, params.exponent_scale);
  } else if constexpr (kInstance.epilogue == Epilogue::kSample) {
    sample_epilogue(acc, view, product, params.args, params.exponent_scale);
  } else if constexpr (kInstance.epilogue == Epilogue::kExpLogits) {
    exp_logits_epilogue<kInstance.general, kInstance.dtype>(acc, view, params);
    if (view.first_column() >= static_cast<int>(params.args.exp_logits.columns)) return;
    store_tile<kInstance.dtype, exponent_of_stored(kInstance.dtype)>(acc, view, params.args.exp_logits,
                                                                     static_cast<int>(product.rows), pass);
  } else {
    gradient_epilogue<kInstance.general>(acc, view, params);
    store_tile<kInstance.dtype, 0>(acc, view, params.args.dz, static_cast<int>(product.rows), pass);
  }
}

// Stages around the current one in the ring: the previous, the current and the next.
struct Stages {
  uint32_t before, now, next;

  // last: number of the stage that was read last.
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

// The pieces of a stage's second step after which copies are started. A copy reads its registers only when it
// begins. Code that needs these registers must wait, and the compiler reuses them at once. Many copies at
// once delay ldmatrix, whose operands the next products need. docs/architecture.md has the gain;
// a ring of kFewStages wants the copies early.
inline constexpr int kWeightPiece = 3;
constexpr int hidden_piece(Epilogue epilogue) {
  return epilogue == Epilogue::kExpLogits ? 2 : 0;
}

// Multiplies the block's i-th tile, in which all warps have a part, and meanwhile starts the copies of later
// stages. These belong to this tile and the next one; both must be whole. The loop has no branch except that
// of wait_for_stage(). All other work is placed between products: these are at least 6 cycles apart, which
// leaves cycles free.
template <Instance kInstance>
__device__ __forceinline__ void multiply_whole_tile(Accumulators& acc, const SharedMemory& shared,
                                                    const MmaParams<ArgsOf<kInstance.epilogue>>& params,
                                                    Stages stages, int i) {
  const LogitsProduct& product = params.product;
  const StageOffsets at = StageOffsets::load(shared);
  Fragments fragments;
  fragments.load(at, {stages.now, 0});
  const int ahead = params.stages - 1;
  Source from(shared, params, i, ahead);
  int left = params.depth_blocks - ahead;  // stages of the tile still to be copied
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
#pragma unroll 1
    for (; left > 0; --left) {
      multiply_step<kInstance.dtype>(acc, fragments, at, {stages.now, 0}, {stages.now, 1}, [](int) {});
      // In the middle of a stage, while its operands are loaded, waits for the next stage. The previous stage
      // has been read by then.
      wait_for_stage<0>(params.stages);
      multiply_step<kInstance.dtype>(acc, fragments, at, {stages.now, 1}, {stages.next, 0}, [&](int piece) {
        const uint32_t place = stages.before + at.copied;
        constexpr int kLast = kWeightPiece + 1;
        if (piece == hidden_piece(kInstance.epilogue)) {
          copy_whole_rows<0, kBlockRows>(place, from.hidden, product.hidden_stride);
        }
        if (piece == kWeightPiece) {
          copy_whole_rows<0, kRowsAtOnce>(place + kHiddenBytes, from.weight, product.weight_stride);
        }
        if (piece != kLast) return;
        copy_whole_rows<kRowsAtOnce, kTileColumns>(place + kHiddenBytes, from.weight, product.weight_stride);
        ptx::copy_async_commit();
      });
      from.advance();
      stages.advance(shared);  // after the last step, the fragments are another tile's
    }
    // Behind the last tile its own first stages are copied once more, unread.
    from = Source(shared, params, i + 1 < shared.tiles() ? i + 1 : i, 0);
    left = ahead;
  }
}

// Multiplies a tile that is not whole, in which some warps have no part, or which such a tile follows.
template <Instance kInstance>
__device__ __forceinline__ void multiply_any_tile(Accumulators& acc, const SharedMemory& shared,
                                                  const MmaParams<ArgsOf<kInstance.epilogue>>& params,
                                                  Stages stages, Loader loader, bool multiplies) {
  for (int k = 0; k < params.depth_blocks; ++k) {
    if (multiplies) {
      const StageOffsets at = StageOffsets::load(shared);
      const Step first{stages.now, 0}, second{stages.now, 1};
      Fragments fragments;
      fragments.load(at, first);
      multiply_step<kInstance.dtype>(acc, fragments, at, first, second, [](int) {});
      multiply_step<kInstance.dtype>(acc, fragments, at, second, second, [](int) {});
    }
    wait_for_stage<0>(params.stages);
    loader.copy(shared, params, stages.before);
    stages.advance(shared);
  }
}

// Returns whether multiply_whole_tile() may be called. The answer is the same for all threads.
template <class Args>
__device__ __forceinline__ bool is_fast(const SharedMemory& shared, const MmaParams<Args>& params, int i) {
  const LogitsProduct& product = params.product;
  const int4 origin = shared.load_origin(i);
  const int rows = shared.load_active().rows;
  return params.depth_blocks >= params.stages && is_whole(shared, params, i) &&
         origin.x + kBlockRows <= rows && row_block_active(product, origin.x, rows) &&
         row_block_active(product, origin.x + kWarpgroupRows, rows) &&
         (i + 1 >= shared.tiles() || is_whole(shared, params, i + 1));
}

template <Instance kInstance>
__device__ __forceinline__ void compute_tiles(const SharedMemory& shared,
                                              const MmaParams<ArgsOf<kInstance.epilogue>>& params) {
  const LogitsProduct& product = params.product;
  const TileView<kLayout> view{shared.view()};
  if (warp_index() == 0) {
    for (int i = 0; i < params.ahead; ++i) find_origin(shared, params, i);
  }
  StageOffsets::of_thread().store(shared);
  __syncthreads();
  Loader first(0, params.depth_blocks);
  for (int i = 0; i + 1 < params.stages; ++i) first.copy(shared, params, shared.stage(i));
  wait_for_stage<1>(params.stages);

  for (int i = 0; i < shared.tiles(); ++i) {
    if (warp_index() == 0) find_origin(shared, params, i + params.ahead);
    const int4 origin = shared.load_origin(i);
    view.store(origin.x + warp_index() / 4 * kWarpgroupRows, shared.load_active().rows, origin.y, origin.z);

    Accumulators acc;  // declared here, so that no register keeps the last tile's
    for_each(acc, [](float) { return 0.f; });
    const int rows = view.rows();
    const bool is_active = row_block_active(product, view.first_row(), rows);
    // Recomputed here, because no registers are free to keep it over epilogues.
    const int next = i * params.depth_blocks + params.stages - 1;
    const Stages stages(shared, next % params.stages);
    if (is_fast(shared, params, i)) {
      multiply_whole_tile<kInstance>(acc, shared, params, stages, i);
    } else {
      // A pair without rows, or a warp without columns, leaves out the products.
      const bool multiplies = is_active && origin.x + warp_index() / 2 * kPairRows < rows &&
                              origin.y + (warp_index() & 1) * kWarpColumns < product.columns;
      multiply_any_tile<kInstance>(acc, shared, params, stages, Loader(next, params.depth_blocks),
                                   multiplies);
    }
    __syncthreads();  // the last stage has been read, and warps exchange through its memory
    const uint32_t pass = shared.stage((next + params.depth_blocks) % params.stages);
    // Warps without rows take part. compute-sanitizer's racecheck reports races for barriers that some warps
    // of a block pass and others do not (docs/architecture.md).
    exchange_halves(acc, pass);
    if (!is_active) continue;
    run_epilogue<kInstance>(acc, view, params, pass);
  }
  ptx::copy_async_wait<0>();
}

// The whole kernel; define_kernel.cuh makes __global__ functions of it.
template <Instance kInstance>
__device__ __forceinline__ void run_mma_kernel(const MmaParams<ArgsOf<kInstance.epilogue>>& params) {
  const SharedMemory shared{params.stages};
  if ((shared.stage(0) & 127) != 0) __trap();
  if (warp_index() == 0) {
    const ActiveRows active = find_active_rows<kBlockRows>(params.product);
    const TileSchedule schedule(params.raster, active.units, params.column_tiles);
    if (lane_index() == 0) shared.store_active(active, schedule.tiles_of(static_cast<int>(blockIdx.x)));
  }
  __syncthreads();
  if (shared.tiles() > 0) compute_tiles<kInstance>(shared, params);
}

}  // namespace logitless::cuda::mma
