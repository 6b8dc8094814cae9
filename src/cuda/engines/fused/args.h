#pragma once
#include <cstdint>

#include "cuda/engines/engine.h"
#include "cuda/engines/fused/tile.h"
#include "cuda/engines/fused/tile_schedule.h"
#include "cuda/engines/logits.h"

// The parts of fused engines that read a launch's arguments.
namespace logitless::cuda::fused {

inline constexpr EngineTraits kTraits{.base_2 = true,
                                      .offsets_first = true,
                                      .keeps_float16 = true,
                                      .top_tile = kTileColumns,
                                      .top_groups = kTopGroups,
                                      .partial_columns = kTileColumns};

// Returns whether the epilogue has a plain kernel for the operands, and it computes everything requested: a
// positive scale, and nothing optional.
bool is_plain(const LogitsArgs& args);

// Returns whether the operands are supported: 16-bit, or e4m3 with kDraw, and rows of multiples of 16 bytes.
bool supports(const LogitsArgs& args);

// Returns the partials of a row where each tile of columns has its own.
int64_t partials_of_tiles(const LogitsArgs& args);

// How a launch cuts its rows and columns into tiles (tile_schedule.h).
struct Tiling {
  int workers = 0;          // clusters, or blocks
  int turns = 1;            // of a worker's warpgroups
  int preferred_units = 0;  // of a raster group
  int64_t units = 0;        // of rows
};

// Returns the number of partials to provide. any_fewer: the device may have fewer units than these.
int partials_of_tiling(const LogitsArgs& args, const Tiling& tiling, bool any_fewer);

// Returns the raster of a launch's partials. Throws an internal error with the engine's name if the arguments
// break a rule of logits.h.
Raster checked_raster(const LogitsArgs& args, const Tiling& tiling, const char* engine);

}  // namespace logitless::cuda::fused
