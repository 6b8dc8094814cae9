#pragma once
#include <cstdint>

#include "cuda/engines/engine.h"
#include "cuda/engines/fused/tile.h"
#include "cuda/engines/fused/tile_schedule.h"
#include "cuda/engines/logits.h"

// What fused engines make of a launch's arguments.
namespace logitless::cuda::fused {

inline constexpr EngineTraits kTraits{.base_2 = true,
                                      .offsets_first = true,
                                      .sums_while_drawing = true,
                                      .top_tile = kTileColumns,
                                      .top_groups = kTopGroups,
                                      .partial_columns = kTileColumns};

// Whether the plain kernel of the epilogue computes all that is asked for: bf16 operands, a positive scale,
// and nothing optional.
bool is_plain(const LogitsArgs& args);

// 16-bit operands, rows of 16-byte multiples, exp_logits of bf16 operands.
bool supports(const LogitsArgs& args);

// Partials of a row where batch_invariant gives each tile of columns its own.
int64_t partials_of_tiles(const LogitsArgs& args);

// How a launch cuts its rows and columns into tiles (tile_schedule.h).
struct Tiling {
  int workers = 0;          // clusters, or blocks
  int turns = 1;            // of a worker's warpgroups
  int preferred_units = 0;  // of a raster group
  int64_t units = 0;        // of rows
};

// Partials to provide. any_fewer: the device may find fewer units than these.
int partials_of_tiling(const LogitsArgs& args, const Tiling& tiling, bool any_fewer);

// The raster of a launch's partials. Throws an internal error with the engine's name where the arguments are
// not what logits.h says.
Raster checked_raster(const LogitsArgs& args, const Tiling& tiling, const char* engine);

}  // namespace logitless::cuda::fused
