#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"
#include "cuda/engines/fused/tile.h"
#include "cuda/engines/logits.h"

namespace logitless::cuda::sm90 {

using namespace fused;

inline constexpr int kRowBytes = 128;  // of an operand in a pipeline stage: one swizzled row
inline constexpr int kStepBytes = 32;  // of a row in one wgmma
inline constexpr int kThreads = 384;   // one loading and two computing warpgroups

// Elements of depth in a pipeline stage.
constexpr int block_depth(DType dtype) {
  return kRowBytes / static_cast<int>(size_of(dtype));
}

// A warpgroup's tile is `halves` wgmma of 64 rows.
constexpr TileLayout layout_of(int halves) {
  return {.first_thread = 128, .half_rows = 64, .warp_rows = 16, .thread_rows = 2 * halves};
}
inline constexpr int kSharedLimit = 232448;

// How thread blocks work.
enum class Tiles : int {
  // A cluster of two blocks shares columns. Each computing warpgroup has its own 128 x 192 tile, and one's
  // epilogue runs under the other's products.
  kPingPong,
  // Likewise, but both warpgroups work on one tile of 256 x 192. This moves fewer bytes for each product, and
  // exposes the epilogue.
  kCooperative,
  // For at most kFewRows rows. Their time is that of reading the weight, so each block works alone: in a
  // cluster the second one would have no rows. A warpgroup multiplies 64 x 192; its other 64 rows are zero.
  kFewRows,
};

inline constexpr int kFewRows = 64;

// Returns the rows of hidden that a copy brings if there are few: whole groups of 8, as the swizzle has them.
LOGITLESS_HD constexpr int copied_few_rows(int64_t rows) {
  return static_cast<int>((rows + 7) / 8) * 8;
}

struct Config {
  Tiles tiles = Tiles::kPingPong;
  int stages = 0;           // of the pipeline
  int staging_buffers = 0;  // for stores: per computing warpgroup, 128 x 64 elements of 16 bits each

  LOGITLESS_HD constexpr bool is_cooperative() const { return tiles == Tiles::kCooperative; }
  LOGITLESS_HD constexpr bool has_few_rows() const { return tiles == Tiles::kFewRows; }
  // Thread blocks of a cluster, side by side along rows.
  LOGITLESS_HD constexpr int cluster_blocks() const { return has_few_rows() ? 1 : 2; }
  LOGITLESS_HD constexpr int tile_rows() const {
    return is_cooperative() ? 2 * kWarpgroupRows : kWarpgroupRows;
  }
  // Rows of a cluster's tile: the unit in which rows are scheduled.
  LOGITLESS_HD constexpr int unit_rows() const { return cluster_blocks() * tile_rows(); }
  // Rows of hidden in a stage.
  LOGITLESS_HD constexpr int loaded_rows() const { return has_few_rows() ? kFewRows : tile_rows(); }
  // A warpgroup's products of 64 rows.
  LOGITLESS_HD constexpr int halves() const { return has_few_rows() ? 1 : 2; }
  // Warpgroups that take a cluster's tiles in turn.
  LOGITLESS_HD constexpr int turns() const { return is_cooperative() ? 1 : 2; }

  LOGITLESS_HD constexpr int hidden_bytes() const { return loaded_rows() * kRowBytes; }
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

// Whether an epilogue has tiles of a kind.
//
// None is cooperative if elements are drawn or listed: the time for many hits is then exposed, 2.4 of 12 ms
// with a uniform softmax at (8192, 128256, 4096). Nor with samples, whose epilogue is longer, or with 8-bit
// operands, whose products hide less: they take half of the time. Tiles of few rows are for inference.
constexpr bool has_tiles(Tiles tiles, Epilogue epilogue, DType dtype) {
  if (tiles == Tiles::kPingPong) return true;
  if (dtype == DType::kE4M3) return false;
  const bool lists = epilogue == Epilogue::kTop || epilogue == Epilogue::kSample;
  if (tiles == Tiles::kFewRows) return lists || epilogue == Epilogue::kStats;
  return !lists && epilogue != Epilogue::kDraw;
}

// The most stages that fit in shared memory beside the buffers of stores. Registers: 40 (loader) and 232
// (computing).
constexpr Config config_of(Tiles tiles, Epilogue epilogue) {
  const bool has_stores = stores(epilogue);
  switch (tiles) {
    case Tiles::kCooperative:
      return has_stores ? Config{tiles, 3, 1} : Config{tiles, 4, 0};
    case Tiles::kFewRows:
      return {tiles, 7, 0};
    default:
      return has_stores ? Config{tiles, 4, 2} : Config{tiles, 5, 0};
  }
}

// The depth from which on tiles are cooperative. The longer the products of a tile, the less its exposed
// epilogue weighs against the bytes saved.
inline constexpr int64_t kCooperativeDepth = 3000;

static_assert(config_of(Tiles::kPingPong, Epilogue::kStats).shared_bytes() <= kSharedLimit);
static_assert(config_of(Tiles::kPingPong, Epilogue::kExpLogits).shared_bytes() <= kSharedLimit);
static_assert(config_of(Tiles::kCooperative, Epilogue::kStats).shared_bytes() <= kSharedLimit);
static_assert(config_of(Tiles::kCooperative, Epilogue::kExpLogits).shared_bytes() <= kSharedLimit);
static_assert(config_of(Tiles::kFewRows, Epilogue::kStats).shared_bytes() <= kSharedLimit);

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
