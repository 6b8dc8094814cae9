#pragma once
#include <cstdint>

#include "cuda/engines/logits.h"

// What the fused engines have in common: a warpgroup of 128 threads holds a tile of 128 x 192 dot products in
// registers, 192 of a thread, and hands it to an epilogue.
namespace logitless::cuda::fused {

inline constexpr int kTileColumns = 192;    // of the weight, one tile
inline constexpr int kWarpgroupRows = 128;  // of hidden, one warpgroup's tile
// Bias or class weights of a tile in shared memory, for each warpgroup.
inline constexpr int kVectorBytes = kTileColumns * 4;
inline constexpr int kViewBytes = 16;     // numbers of a tile in shared memory, for each warp
inline constexpr int kStoreColumns = 64;  // of an output tile in one store
// Of a tile, whose maxima kTop tells: the columns of each lane of a quad.
inline constexpr int kTopGroups = 4;

// Which of a block's threads hold tiles, two warpgroups of them, and where in its tile a warp's rows are: 16
// from each multiple of half_rows. See tile_view.cuh.
struct TileLayout {
  int first_thread = 0;
  int half_rows = 0;  // from a warp's first 16 rows to its other 16
  int warp_rows = 0;  // from a warp's first row to the next warp's
  // Whether the compiler is kept from working on all elements of a row at once where it would run out of
  // registers.
  bool in_pieces = false;
};

constexpr int64_t tiles_of_columns(int64_t columns) {
  return (columns + kTileColumns - 1) / kTileColumns;
}

// Whether tiles are stored.
constexpr bool stores(Epilogue epilogue) {
  return epilogue == Epilogue::kExpLogits || epilogue == Epilogue::kGradient;
}

}  // namespace logitless::cuda::fused
