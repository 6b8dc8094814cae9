#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "cuda/engines/fused/tile.h"
#include "cuda/engines/logits.h"

namespace logitless::cuda::fused::ptx {}

namespace logitless::cuda::mma {

using namespace fused;
namespace ptx {
using namespace fused::ptx;
}

inline constexpr int kBlockRows = 256;  // of hidden, one tile of a thread block: two warpgroups' rows
inline constexpr int kBlockDepth = 32;  // elements of depth in a stage
inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
// In epilogues a warp has 32 consecutive rows and all columns of the tile.
inline constexpr TileLayout kLayout{.first_thread = 0, .half_rows = 16, .warp_rows = 32, .in_pieces = true};

// In products, two warps form a pair and share 64 rows, with 96 columns each: this makes the most of the
// bytes that a warp reads from shared memory. Afterwards they exchange halves (exchange.cuh).
inline constexpr int kPairRows = 64;
inline constexpr int kWarpColumns = kTileColumns / 2;

inline constexpr int kRowBytes = kBlockDepth * 2;  // of an operand in a stage
inline constexpr int kHiddenBytes = kBlockRows * kRowBytes;
inline constexpr int kWeightBytes = kTileColumns * kRowBytes;
inline constexpr int kStageBytes = kHiddenBytes + kWeightBytes;
// The stage that was read last is reused: each warp passes elements through its part.
inline constexpr int kPassBytes = kStageBytes / kWarps;

// Tiles whose origins are kept at once: the current one and the MmaParams::ahead next ones. If each tile has
// one block of depth, those are kMostStages + 1.
inline constexpr int kOrigins = 8;
inline constexpr int kOriginBytes = 16;
inline constexpr int kThreadBytes = 16;  // of a thread's offsets

// Stages of a ring with products, including the one being copied: what 99 and 163 KB of shared memory hold.
inline constexpr int kFewStages = 3;
inline constexpr int kMostStages = 5;

constexpr int shared_bytes(int stages) {
  return stages * kStageBytes + 2 * kVectorBytes + kWarps * kViewBytes + kOrigins * kOriginBytes + 16 +
         kThreads * kThreadBytes;
}

// Returns the stages that a device's blocks have room for; 0: too little room.
constexpr int stages_of(int64_t shared_limit) {
  if (shared_bytes(kMostStages) <= shared_limit) return kMostStages;
  return shared_bytes(kFewStages) <= shared_limit ? kFewStages : 0;
}

static_assert(stages_of(99 << 10) == kFewStages && stages_of(163 << 10) == kMostStages);
static_assert(kMostStages + 2 <= kOrigins);

// One compiled kernel.
struct Instance {
  Epilogue epilogue = Epilogue::kStats;
  DType dtype = DType::kBF16;
  // Supports all of LogitTransform, any scale and the optional sums. A plain kernel supports only a
  // positive scale.
  bool general = false;

  constexpr bool operator==(const Instance&) const = default;
};

}  // namespace logitless::cuda::mma
