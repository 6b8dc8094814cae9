#pragma once
#include <cstdint>

#include "cuda/engines/logits.h"

// The tile of fused engines: a warpgroup of 128 threads holds 128 x 192 dot products in registers, 192 in
// each thread, and hands them to an epilogue.
namespace logitless::cuda::fused {

inline constexpr int kTileColumns = 192;  // of the weight, one tile
static_assert(kTileColumns == kExponentColumns);
inline constexpr int kWarpgroupRows = 128;  // of hidden, one warpgroup's tile
// Bias or class weights of a tile in shared memory, for each warpgroup.
inline constexpr int kVectorBytes = kTileColumns * 4;
inline constexpr int kViewBytes = 16;     // numbers of a tile in shared memory, for each warp
inline constexpr int kStoreColumns = 64;  // of an output tile in one store
// Groups of columns in a tile, whose maxima kTop reports: the columns of each lane of a quad.
inline constexpr int kTopGroups = 4;

// The threads of a block that hold tiles (two warpgroups), and the rows of a warp in its tile: 16 from each
// multiple of half_rows. See tile_view.cuh.
struct TileLayout {
  int first_thread = 0;
  int half_rows = 0;  // from a warp's first 16 rows to its other 16
  int warp_rows = 0;  // from a warp's first row to the next warp's
  // Whether the compiler is kept from working on all elements of a row at once, because it would run out of
  // registers.
  bool in_pieces = false;
  // Rows of each thread that may exist: 4, or the first 2 if the others are beyond half_rows and empty.
  int thread_rows = 4;
};

constexpr int64_t tiles_of_columns(int64_t columns) {
  return (columns + kTileColumns - 1) / kTileColumns;
}

// Returns whether tiles are stored.
constexpr bool stores(Epilogue epilogue) {
  return epilogue == Epilogue::kExpLogits || epilogue == Epilogue::kGradient;
}

}  // namespace logitless::cuda::fused
