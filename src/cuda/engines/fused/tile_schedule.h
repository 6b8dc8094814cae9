#pragma once
#include <cstdint>

#include "core/host_device.h"

// Assigns tiles to clusters and warpgroups, and the statistics of their rows to partials.
//
// Rows are cut into units (the rows of a cluster's tile), columns into tiles. Units are gathered in groups
// that are small enough for their hidden rows to stay in L2. Within a group units run fastest, then column
// tiles. Tile t goes to cluster t mod clusters, as its (t / clusters)-th; with ping-pong its warpgroups take
// turns. So tile t belongs to worker t mod W, W = clusters * turns, and a unit of a group of g units is
// visited by W / gcd(g, W) workers: its column tile c by the worker of its column tile c + W / gcd(g, W).
// With partial = c mod (W / gcd(g, W)) every (partial, row) has one writer.
//
// The sizes of groups are chosen for L2 and few partials. Most groups have one size that shares factors with
// W: at 132 workers groups of 16, 12 and 6 units need 33, 11 and 22 partials. The rest is a tail of a few
// groups, looked up in a table. The whole table is made, because the number of units may be known on the
// device only.
//
// If a row's sums must not depend on the number of rows and clusters, every column tile has its own partial
// (Raster::first_partial): more partials, the same tiles for each cluster.
namespace logitless::cuda::fused {

inline constexpr int kMaxMainUnits = 24;
inline constexpr int kTails = 3 * kMaxMainUnits;  // and at least 24 + kMaxMainUnits
inline constexpr int kTailGroups = 7;

struct RasterGroup {
  uint8_t units = 0;
  uint8_t partials = 0;
};

struct RasterTail {
  RasterGroup groups[kTailGroups];
  uint8_t clusters = 0;  // clusters that take part; fewer than all only if the partials are too few for all
};

struct Raster {
  RasterGroup main;
  int32_t tail_units = 0;      // a multiple of main.units; larger numbers of units have main groups
  RasterTail tails[kTails];    // by units, below tail_units + main.units
  int32_t first_partial = -1;  // of the first column tile, if each tile has its own; else -1
};

struct Tile {
  int32_t unit = 0;
  int32_t column = 0;  // tile of columns
  int32_t partial = 0;
};

class TileSchedule {
 public:
  LOGITLESS_HD constexpr TileSchedule(const Raster& raster, int32_t units, int32_t column_tiles)
      : raster_(raster), column_tiles_(column_tiles), tiles_(units * column_tiles) {
    main_groups_ = units < raster.tail_units ? 0 : (units - raster.tail_units) / raster.main.units;
    tail_ = units - main_groups_ * raster.main.units;
  }

  LOGITLESS_HD constexpr int32_t tiles() const { return tiles_; }
  LOGITLESS_HD constexpr int32_t clusters() const { return raster_.tails[tail_].clusters; }

  // Tiles of one cluster: its i-th is cluster + i * clusters().
  LOGITLESS_HD constexpr int32_t tiles_of(int32_t cluster) const {
    return cluster < clusters() && cluster < tiles_ ? (tiles_ - cluster + clusters() - 1) / clusters() : 0;
  }

  LOGITLESS_HD constexpr Tile at(int32_t tile) const {
    const int32_t main_tiles = raster_.main.units * column_tiles_;
    const int32_t main_group = tile / main_tiles;
    if (main_group < main_groups_) {
      return in_group(raster_.main, main_group * raster_.main.units, tile - main_group * main_tiles);
    }
    tile -= main_groups_ * main_tiles;
    int32_t first = main_groups_ * raster_.main.units;
    int index = 0;
    RasterGroup group = raster_.tails[tail_].groups[0];
    while (index + 1 < kTailGroups && tile >= group.units * column_tiles_) {
      tile -= group.units * column_tiles_;
      first += group.units;
      group = raster_.tails[tail_].groups[++index];
    }
    return in_group(group, first, tile);
  }

 private:
  LOGITLESS_HD constexpr Tile in_group(RasterGroup group, int32_t first, int32_t tile) const {
    Tile result;
    result.column = tile / group.units;
    result.unit = first + tile - result.column * group.units;
    result.partial =
        raster_.first_partial < 0 ? result.column % group.partials : raster_.first_partial + result.column;
    return result;
  }

  const Raster& raster_;
  int32_t column_tiles_;
  int32_t tiles_;
  int32_t main_groups_ = 0;
  int32_t tail_ = 0;
};

// Returns a raster, solved once for the same arguments and kept. preferred: units of a main group whose
// hidden rows stay in L2. most_partials: the number of available partials. With fewer than raster_partials()
// of the same arguments, fewer clusters work.
const Raster& make_raster(int clusters, int turns, int preferred, int most_partials);

// Returns the partials that `units` of the raster use.
int raster_partials(const Raster& raster, int64_t units);

// Returns the number of partials to provide. any_fewer: the device may have fewer units than these.
int needed_partials(int clusters, int turns, int preferred, int64_t units, bool any_fewer);

}  // namespace logitless::cuda::fused
