#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/engines/fused/epilogue_draw.cuh"
#include "cuda/engines/fused/epilogue_exp_logits.cuh"
#include "cuda/engines/fused/epilogue_gradient.cuh"
#include "cuda/engines/fused/epilogue_sample.cuh"
#include "cuda/engines/fused/epilogue_stats.cuh"
#include "cuda/engines/fused/epilogue_top.cuh"
#include "cuda/engines/fused/kernel_params.cuh"
#include "cuda/engines/fused/tile_view.cuh"
#include "cuda/engines/sm90/config.h"
#include "cuda/engines/sm90/epilogue_store.cuh"
#include "cuda/engines/sm90/ptx.cuh"

// One persistent kernel: logits of tiles by wgmma, each tile handed to an epilogue while it is in registers.
//
// A cluster of two blocks takes a unit of rows and 192 columns at a time. Each block loads its own rows and
// half of the columns, the latter into both blocks. With few rows a cluster is one block. Warpgroup 0 loads
// through a ring of stages; warpgroups 1 and 2 compute.
namespace logitless::cuda::sm90 {

// Shared memory: [stages][hidden | weight] [staging of warpgroup 1 | 2] [full barriers]
// [empty barriers] [TileView] [ActiveRows] [two TileOrigins] [barrier of origins]
// The base is the symbol itself, which costs no register. The kernel checks that it is aligned for the
// swizzle.
extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];

// The origin of a tile's copies.
struct TileOrigin {
  int row;     // of this block's rows
  int column;  // of this block's half of the columns
};

template <Config kConfig>
struct SharedMemory {
  __device__ static uint32_t base() { return ptx::shared_address(dynamic_shared_memory); }
  __device__ uint32_t hidden(int stage) const { return base() + stage * kConfig.stage_bytes(); }
  __device__ uint32_t weight(int stage) const { return hidden(stage) + kConfig.hidden_bytes(); }
  __device__ uint32_t staging() const { return hidden(kConfig.stages); }
  __device__ uint32_t full(int stage) const { return staging() + kConfig.staging_bytes() + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(kConfig.stages) + stage * 8; }
  __device__ uint32_t view() const { return empty(kConfig.stages); }
  __device__ uint32_t active_rows() const { return view() + 2 * kVectorBytes + 8 * 16; }

  __device__ void store_active(ActiveRows active) const {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(active_rows()), "r"(active.rows), "r"(active.units)
                 : "memory");
  }
  __device__ ActiveRows load_active() const {
    ActiveRows active;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(active.rows), "=r"(active.units)
                 : "r"(active_rows()));
    return active;
  }

  // The origin of the cluster's i-th tile.
  __device__ uint32_t origin(int i) const { return active_rows() + 8 + (i & 1) * 8; }
  __device__ void store_origin(int i, TileOrigin tile) const {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(origin(i)), "r"(tile.row), "r"(tile.column)
                 : "memory");
  }
  __device__ TileOrigin load_origin(int i) const {
    TileOrigin tile;
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
                 : "=r"(tile.row), "=r"(tile.column)
                 : "r"(origin(i))
                 : "memory");
    return tile;
  }

  // The barrier where the two warps of find_tiles() and load_tiles() meet, once for each tile. After it the
  // tile's origin is there, and the previous one has been read. Called by both whole warps.
  __device__ uint32_t origins() const { return active_rows() + 8 + 16; }
  __device__ void meet_at_origin(int i) const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive(origins());
    ptx::mbarrier_wait(origins(), i & 1);
  }
};

// A stage of the ring and the parity of its barriers.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // The position after `count` stages.
  __device__ static __forceinline__ RingPosition at(uint32_t count) {
    return {static_cast<int>(count % kStages), (count / kStages) & 1};
  }
};

template <Config kConfig, class Args>
__device__ __forceinline__ TileSchedule schedule_of(const SharedMemory<kConfig>& shared,
                                                    const KernelParams<Args>& params) {
  return TileSchedule(params.raster, shared.load_active().units, params.column_tiles);
}

// Runs in its own warp, a tile ahead of load_tiles(): the divisions take longer than loading may pause.
template <Config kConfig, class Args>
__device__ __forceinline__ void find_tiles(const SharedMemory<kConfig>& shared,
                                           const KernelParams<Args>& params) {
  const int tiles = schedule_of(shared, params).tiles_of(ptx::cluster_index());
  const int rank = static_cast<int>(ptx::cluster_rank());
  for (int i = 0; i < tiles; ++i) {
    const TileSchedule schedule = schedule_of(shared, params);
    const Tile tile = schedule.at(ptx::cluster_index() + i * schedule.clusters());
    const int unit = active_unit<kConfig.unit_rows()>(params.product, shared.load_active().rows, tile.unit);
    if ((threadIdx.x & 31) == 0) {
      shared.store_origin(i, {unit * kConfig.unit_rows() + rank * kConfig.tile_rows(),
                              tile.column * kTileColumns + rank * (kTileColumns / kConfig.cluster_blocks())});
    }
    shared.meet_at_origin(i);
  }
}

// Bytes of hidden that a copy brings into a stage. With few rows these are copied_few_rows(); the rows behind
// them stay zero (clear_hidden()).
template <Config kConfig>
__device__ __forceinline__ int copied_hidden_bytes(int64_t rows) {
  return kConfig.has_few_rows() ? copied_few_rows(rows) * kRowBytes : kConfig.hidden_bytes();
}

// Called by all threads of the block, before the first copy.
template <Config kConfig>
__device__ __forceinline__ void clear_hidden(const SharedMemory<kConfig>& shared) {
  for (int stage = 0; stage < kConfig.stages; ++stage) {
    for (int at = static_cast<int>(threadIdx.x) * 4; at < kConfig.hidden_bytes(); at += kThreads * 4) {
      ptx::store_shared(shared.hidden(stage) + at, 0.f);
    }
  }
  ptx::fence_shared_to_copy_engine();
}

// Called by a whole warp; one thread issues the copies.
template <Config kConfig, int kBlockDepth, class Args>
__device__ __forceinline__ void load_tiles(const SharedMemory<kConfig>& shared, const CUtensorMap& hidden,
                                           const CUtensorMap& weight, const KernelParams<Args>& params) {
  const int tiles = schedule_of(shared, params).tiles_of(ptx::cluster_index());
  const uint32_t half = ptx::cluster_rank() * (kConfig.weight_bytes() / kConfig.cluster_blocks());
  const int stage_bytes = copied_hidden_bytes<kConfig>(params.product.rows) + kConfig.weight_bytes();
  RingPosition<kConfig.stages> ring;
  for (int i = 0; i < tiles; ++i) {
    shared.meet_at_origin(i);
    const TileOrigin tile = shared.load_origin(i);
    if ((threadIdx.x & 31) == 0) {
      for (int k = 0; k < params.depth_blocks; ++k) {
        ptx::mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
        const uint32_t full = shared.full(ring.stage);
        ptx::mbarrier_arrive_expect(full, stage_bytes);
        ptx::tma_load(shared.hidden(ring.stage), &hidden, full, k * kBlockDepth, tile.row);
        if constexpr (kConfig.cluster_blocks() == 1) {
          ptx::tma_load(shared.weight(ring.stage), &weight, full, k * kBlockDepth, tile.column);
        } else {
          ptx::tma_load_multicast(shared.weight(ring.stage) + half, &weight, full, k * kBlockDepth,
                                  tile.column, (1 << kConfig.cluster_blocks()) - 1);
        }
        ring.advance();
      }
    }
    __syncwarp();
  }
}

// The computing warpgroup: 0 or 1.
__device__ __forceinline__ int computing_warpgroup() {
  return ptx::thread_index() / 128 - 1;
}

// Multiplies one tile, beginning at the ring position; on return acc is complete. Signals both blocks of the
// cluster when a stage has been read. With pass_on it also signals the other warpgroup, by its named barrier,
// when all products are issued.
template <Config kConfig, DType kType>
__device__ __forceinline__ void multiply_tile(Accumulators& acc, const SharedMemory<kConfig>& shared,
                                              RingPosition<kConfig.stages> ring, int depth_blocks,
                                              bool pass_on) {
  const int thread = static_cast<int>(threadIdx.x) & 127;
  const uint32_t first_row =
      kConfig.is_cooperative() ? computing_warpgroup() * kWarpgroupRows * kRowBytes : 0;
  int previous = -1;
  for (int k = 0; k < depth_blocks; ++k) {
    // to_uniform() makes the compiler see that all lanes have the same value. Descriptors are then made by
    // the uniform unit, with one addition each.
    const uint32_t a = ptx::to_uniform(ptx::matrix_offset(shared.hidden(ring.stage) + first_row));
    const uint32_t b = ptx::to_uniform(ptx::matrix_offset(shared.weight(ring.stage)));
    ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRowBytes / kStepBytes; ++step) {
#pragma unroll
      for (int half = 0; half < kConfig.halves(); ++half) {
        ptx::wgmma_n192<kType>(acc[half], ptx::matrix_descriptor(a + step * 2 + half * 512),
                               ptx::matrix_descriptor(b + step * 2), (k | step) != 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    // The previous stage has been read: one thread signals each block.
    if (previous >= 0 && thread < kConfig.cluster_blocks())
      ptx::mbarrier_arrive_remote(shared.empty(previous), thread);
    previous = ring.stage;
    ring.advance();
  }
  if (pass_on) ptx::named_barrier_arrive(2 - computing_warpgroup(), 256);
  ptx::wgmma_wait<0>();
  if (thread < kConfig.cluster_blocks()) ptx::mbarrier_arrive_remote(shared.empty(previous), thread);
}

template <Instance kInstance>
__device__ __forceinline__ void compute_tiles(const SharedMemory<kInstance.config>& shared,
                                              const CUtensorMap& out,
                                              const KernelParams<ArgsOf<kInstance.epilogue>>& params) {
  constexpr Config kConfig = kInstance.config;
  constexpr bool kPingPong = !kConfig.is_cooperative();
  constexpr DType kStored = stored_dtype(kInstance.dtype);
  constexpr int kOutExponent = kInstance.epilogue == Epilogue::kExpLogits ? exponent_of_stored(kStored) : 0;
  const LogitsProduct& product = params.product;
  using View = TileView<layout_of(kConfig.halves())>;
  const View view{shared.view()};

  // Named barriers 1 and 2 order the products of the two warpgroups: each waits on its own, the other arrives
  // there.
  if (kPingPong && computing_warpgroup() == 1 &&
      schedule_of(shared, params).tiles_of(ptx::cluster_index()) > 0) {
    ptx::named_barrier_arrive(1, 256);
  }
  for (int i = kPingPong ? computing_warpgroup() : 0;; i += kConfig.turns()) {
    const ActiveRows active = shared.load_active();
    const TileSchedule schedule = schedule_of(shared, params);
    const int tiles = schedule.tiles_of(ptx::cluster_index());
    if (i >= tiles) break;
    const Tile tile = schedule.at(ptx::cluster_index() + i * schedule.clusters());
    const int unit = active_unit<kConfig.unit_rows()>(product, active.rows, tile.unit);
    const int block = static_cast<int>(ptx::cluster_rank()) * (kConfig.is_cooperative() ? 2 : 1) +
                      (kConfig.is_cooperative() ? computing_warpgroup() : 0);
    view.store(unit * kConfig.unit_rows() + block * kWarpgroupRows, active.rows, tile.column * kTileColumns,
               tile.partial);

    Accumulators acc;  // declared here, so that no register keeps the last tile's
    if (kPingPong) ptx::named_barrier_sync(1 + computing_warpgroup(), 256);
    const bool pass_on = kPingPong && i + 1 < tiles;
    const auto ring = RingPosition<kConfig.stages>::at(static_cast<uint32_t>(i) * params.depth_blocks);
    multiply_tile<kConfig, kInstance.dtype>(acc, shared, ring, params.depth_blocks, pass_on);
    clear_empty_rows<View>(acc);

    if (!row_block_active(product, view.first_row(), view.rows())) continue;
    if constexpr (kInstance.dtype == DType::kE4M3) multiply_by_factors(acc, view, product);
    if constexpr (kInstance.epilogue == Epilogue::kStats) {
      constexpr bool kGeneral = kInstance.general, kFp8 = kInstance.dtype == DType::kE4M3;
      stats_epilogue<kGeneral, kGeneral, kGeneral && kFp8>(acc, view, product, params.args,
                                                           params.exponent_scale);
    } else if constexpr (kInstance.epilogue == Epilogue::kExpLogits) {
      exp_logits_epilogue<kInstance.general, kStored>(acc, view, params);
    } else if constexpr (kInstance.epilogue == Epilogue::kDraw) {
      draw_epilogue<kInstance.general>(acc, view, product, params.args, params.exponent_scale);
    } else if constexpr (kInstance.epilogue == Epilogue::kTop) {
      top_epilogue(acc, view, product, params.args, params.exponent_scale);
    } else if constexpr (kInstance.epilogue == Epilogue::kSample) {
      sample_epilogue(acc, view, product, params.args, params.exponent_scale);
    } else {
      gradient_epilogue<kInstance.general>(acc, view, params);
    }
    if constexpr (kInstance.epilogue == Epilogue::kExpLogits) {
      if (view.first_column() >= static_cast<int>(params.args.exp_logits.columns)) continue;
    }
    if constexpr (kConfig.staging_buffers > 0) {
      store_tile<kConfig, kStored, kOutExponent>(acc, view, &out, shared.staging());
    }
  }
  if (kConfig.staging_buffers > 0 && (threadIdx.x & 127) == 0) ptx::tma_store_wait<0>();
}

// The whole kernel; define_kernel.cuh makes __global__ functions of it.
template <Instance kInstance>
__device__ __forceinline__ void run_logits_kernel(const CUtensorMap& hidden, const CUtensorMap& weight,
                                                  const CUtensorMap& out,
                                                  const KernelParams<ArgsOf<kInstance.epilogue>>& params) {
  constexpr Config kConfig = kInstance.config;
  const SharedMemory<kConfig> shared;
  if ((shared.base() & 1023) != 0) __trap();
  if (threadIdx.x < 32) {
    const ActiveRows active = find_active_rows<kConfig.unit_rows()>(params.product);
    if (threadIdx.x == 0) shared.store_active(active);
  }
  __syncthreads();
  // Without rows nothing is set up for them. That is the usual case when blocks are done again.
  if (shared.load_active().units == 0) return;
  if constexpr (kConfig.has_few_rows()) clear_hidden(shared);
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) {
      ptx::tma_prefetch_descriptor(&hidden);
      ptx::tma_prefetch_descriptor(&weight);
      for (int stage = 0; stage < kConfig.stages; ++stage) {
        ptx::mbarrier_init(shared.full(stage), 1);
        // A computing warpgroup (two, if they cooperate) of each block reads a stage.
        ptx::mbarrier_init(shared.empty(stage),
                           kConfig.cluster_blocks() * (kConfig.is_cooperative() ? 2 : 1));
      }
      ptx::mbarrier_init(shared.origins(), 2);
      ptx::mbarrier_init_fence();
    }
    __syncwarp();
  }
  // Neither block's copies or arrivals may reach barriers of the other that are not ready.
  ptx::cluster_sync();
  if (threadIdx.x < 128) {
    ptx::give_registers<40>();
    if (threadIdx.x < 32) {
      load_tiles<kConfig, block_depth(kInstance.dtype)>(shared, hidden, weight, params);
    } else if (threadIdx.x < 64) {
      find_tiles<kConfig>(shared, params);
    }
  } else {
    ptx::take_registers<232>();
    compute_tiles<kInstance>(shared, out, params);
  }
  // Shared memory and barriers of a block must stay until the other block has sent its last copy and arrival.
  ptx::cluster_sync_diverged();
}

}  // namespace logitless::cuda::sm90
