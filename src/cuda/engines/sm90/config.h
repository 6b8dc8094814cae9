#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"
#include "cuda/engines/fused/tile.h"
#include "cuda/engines/logits.h"

namespace logitless::cuda::sm90 {

using namespace fused;

inline constexpr int kRowBytes = 128;     // of an operand in a pipeline stage: one swizzled row
inline constexpr int kStepBytes = 32;     // of a row in one wgmma
inline constexpr int kClusterBlocks = 2;  // thread blocks of a cluster, side by side along rows
inline constexpr int kThreads = 384;      // one loading and two computing warpgroups

// Elements of depth in a pipeline stage.
constexpr int block_depth(DType dtype) {
  return kRowBytes / static_cast<int>(size_of(dtype));
}

// A warpgroup's tile is two wgmma of 64 rows.
inline constexpr TileLayout kLayout{.first_thread = 128, .half_rows = 64, .warp_rows = 16};
inline constexpr int kSharedLimit = 232448;

// How a thread block works. Ping-pong: each computing warpgroup has its own 128 x 192 tile, and one's
// epilogue runs under the other's products. Cooperative: both work on one tile of 256 x 192, which moves
// fewer bytes for each product, with the epilogue exposed.
struct Config {
  bool cooperative = false;
  int stages = 0;           // of the pipeline
  int staging_buffers = 0;  // for stores: per computing warpgroup, 128 x 64 elements of 16 bits each

  LOGITLESS_HD constexpr int tile_rows() const { return cooperative ? 2 * kWarpgroupRows : kWarpgroupRows; }
  // Rows of a cluster's tile: the unit in which rows are scheduled.
  LOGITLESS_HD constexpr int unit_rows() const { return kClusterBlocks * tile_rows(); }
  // Warpgroups that take a cluster's tiles in turn.
  LOGITLESS_HD constexpr int turns() const { return cooperative ? 1 : 2; }

  LOGITLESS_HD constexpr int hidden_bytes() const { return tile_rows() * kRowBytes; }
  LOGITLESS_HD constexpr int weight_bytes() const { return kTileColumns * kRowBytes; }
  LOGITLESS_HD constexpr int stage_bytes() const { return hidden_bytes() + weight_bytes(); }
  LOGITLESS_HD constexpr int staging_bytes() const { return 2 * staging_buffers * staging_buffer_bytes(); }
  LOGITLESS_HD constexpr int staging_buffer_bytes() const { return kWarpgroupRows * kStoreColumns * 2; }
  // Two barriers for each stage, 8 bytes about rows, 16 of two tiles' origins and their barrier, 16 for each
  // of the 8 computing warps.
  LOGITLESS_HD constexpr int shared_bytes() const {
    return stages * (stage_bytes() + 16) + staging_bytes() + 2 * kVectorBytes + 8 + 16 + 8 + 8 * kViewBytes;
  }

  constexpr bool operator==(const Config&) const = default;
};

// Whether there are cooperative tiles. Never if elements are drawn or listed: the time for many hits is then
// exposed, 2.4 of 12 ms with a uniform softmax at (8192, 128256, 4096). Nor with samples, whose epilogue is
// longer, or with 8-bit operands, whose products hide less: they take half of the time.
constexpr bool may_cooperate(Epilogue epilogue, DType dtype) {
  return epilogue != Epilogue::kDraw && epilogue != Epilogue::kTop && epilogue != Epilogue::kSample &&
         dtype != DType::kE4M3;
}

// 5 stages fit in shared memory, or 4 beside the buffers of stores. Registers: 40 (loader) and 232
// (computing).
constexpr Config ping_pong(Epilogue epilogue) {
  return stores(epilogue) ? Config{false, 4, 2} : Config{false, 5, 0};
}

constexpr Config cooperative(Epilogue epilogue) {
  return stores(epilogue) ? Config{true, 3, 1} : Config{true, 4, 0};
}

constexpr Config config_of(Epilogue epilogue, bool is_cooperative) {
  return is_cooperative ? cooperative(epilogue) : ping_pong(epilogue);
}

// The depth from which on tiles are cooperative. The longer the products of a tile, the less its exposed
// epilogue weighs against the bytes saved.
inline constexpr int64_t kCooperativeDepth = 3000;

static_assert(ping_pong(Epilogue::kStats).shared_bytes() <= kSharedLimit);
static_assert(ping_pong(Epilogue::kExpLogits).shared_bytes() <= kSharedLimit);
static_assert(cooperative(Epilogue::kStats).shared_bytes() <= kSharedLimit);
static_assert(cooperative(Epilogue::kExpLogits).shared_bytes() <= kSharedLimit);

// One compiled kernel.
struct Instance {
  Config config;
  Epilogue epilogue = Epilogue::kStats;
  DType dtype = DType::kBF16;
  // Supports all of LogitTransform, any scale and the optional sums. A plain kernel supports only a
  // positive scale.
  bool general = false;

  constexpr bool operator==(const Instance&) const = default;
};

}  // namespace logitless::cuda::sm90
