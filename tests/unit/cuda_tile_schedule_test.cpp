// The schedule of the fused kernels, on the host: every tile comes once, each (partial, row) has one writer,
// and partials are few.
#include "cuda/engines/fused/tile_schedule.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

namespace logitless::cuda::fused {
namespace {

constexpr int kUnlimited = 1 << 20;

struct Device {
  int clusters;
  int turns;
};

// 132 SMs (H100 SXM, H200) in clusters of two, 114 (H100 PCIe), 78 (H20), odd numbers, and a single cluster;
// then single SMs, as A100, A10, RTX 3090, RTX 4090, H200, L40S, B200 and RTX 5090 have them.
const Device kDevices[] = {{66, 2},  {66, 1}, {57, 2}, {39, 2},  {61, 2},  {7, 2},   {1, 2},   {1, 1},
                           {108, 1}, {72, 1}, {82, 1}, {128, 1}, {132, 1}, {142, 1}, {148, 1}, {170, 1}};

// Walks the tiles as the kernel does and checks that each is visited once, by a single writer of its partial.
void check_schedule(const Raster& raster, Device device, int units, int column_tiles, int most_partials) {
  const TileSchedule schedule(raster, units, column_tiles);
  ASSERT_EQ(schedule.tiles(), units * column_tiles);
  ASSERT_LE(schedule.clusters(), device.clusters);
  std::vector<int> visits(static_cast<size_t>(units) * column_tiles, 0);
  std::map<std::pair<int, int>, int> writer;  // (partial, unit) -> worker
  for (int cluster = 0; cluster < device.clusters; ++cluster) {
    const int tiles = schedule.tiles_of(cluster);
    for (int i = 0; i < tiles; ++i) {
      const Tile tile = schedule.at(cluster + i * schedule.clusters());
      ASSERT_GE(tile.unit, 0);
      ASSERT_LT(tile.unit, units);
      ASSERT_GE(tile.column, 0);
      ASSERT_LT(tile.column, column_tiles);
      ASSERT_GE(tile.partial, 0);
      ASSERT_LT(tile.partial, most_partials);
      ++visits[static_cast<size_t>(tile.unit) * column_tiles + tile.column];
      const int worker = cluster * device.turns + i % device.turns;
      const auto [entry, is_new] = writer.insert({{tile.partial, tile.unit}, worker});
      ASSERT_EQ(entry->second, worker)
          << "partial " << tile.partial << " of unit " << tile.unit << " has two writers; units " << units
          << ", column tiles " << column_tiles;
    }
  }
  for (const int count : visits) ASSERT_EQ(count, 1);
}

// Calls check(device, preferred, units) for every device, until one fails.
template <class Check>
void for_devices(std::initializer_list<int> preferred, std::initializer_list<int> units, const Check& check) {
  for (const Device device : kDevices) {
    for (const int most : preferred) {
      for (const int count : units) {
        check(device, most, count);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(TileSchedule, EveryTileOnceAndOneWriterOfAPartial) {
  for_devices({2, 3, 4, 6, 8, 12, 17, 24},
              {1, 2, 3, 5, 7, 11, 13, 16, 17, 19, 23, 31, 37, 64, 71, 72, 73, 97, 127, 128, 131},
              [](Device device, int preferred, int units) {
                const Raster raster = make_raster(device.clusters, device.turns, preferred, kUnlimited);
                for (const int column_tiles : {1, 2, 3, 7, 29, 101}) {
                  check_schedule(raster, device, units, column_tiles, raster_partials(raster, units));
                }
              });
}

// The device may find any smaller number of units. The partials provided for the largest number must do.
TEST(TileSchedule, PartialsSufficeForAnyFewerUnits) {
  for_devices({2, 4, 12, 24}, {1, 2, 9, 13, 14, 40, 75}, [](Device device, int preferred, int units) {
    const int partials = needed_partials(device.clusters, device.turns, preferred, units, true);
    const Raster raster = make_raster(device.clusters, device.turns, preferred, partials);
    for (int fewer = 0; fewer <= units; ++fewer) check_schedule(raster, device, fewer, 37, partials);
  });
}

// Where sums must not depend on rows and clusters, columns alone decide the partials. The tiles are the same.
TEST(TileSchedule, PartialsOfTheirOwnAreThoseOfColumns) {
  for_devices({2, 4, 12, 24}, {1, 2, 9, 13, 14, 40, 75}, [](Device device, int preferred, int units) {
    const Raster shared = make_raster(device.clusters, device.turns, preferred, kUnlimited);
    Raster own = shared;
    own.first_partial = 5;
    for (const int column_tiles : {1, 2, 29, 101}) {
      check_schedule(own, device, units, column_tiles, own.first_partial + column_tiles);
      const TileSchedule schedule(own, units, column_tiles), same(shared, units, column_tiles);
      for (int tile = 0; tile < schedule.tiles(); ++tile) {
        EXPECT_EQ(schedule.at(tile).partial, 5 + schedule.at(tile).column);
        EXPECT_EQ(schedule.at(tile).column, same.at(tile).column);
        EXPECT_EQ(schedule.at(tile).unit, same.at(tile).unit);
      }
    }
  });
}

TEST(TileSchedule, AllClustersWorkOnManyUnits) {
  for (const int preferred : {4, 6, 12, 24}) {
    const int partials = needed_partials(66, 2, preferred, 1000, true);
    const Raster raster = make_raster(66, 2, preferred, partials);
    for (int units = 14; units < 1000; ++units)
      EXPECT_EQ(TileSchedule(raster, units, 3).clusters(), 66) << units;
  }
}

// 132 SMs, ping-pong and cooperative, need at most 33 partials.
TEST(TileSchedule, PartialsAreFew) {
  for (int64_t units = 14; units < 5000; ++units) {
    for (const int preferred : {24, 16, 9, 4})
      EXPECT_LE(needed_partials(66, 2, preferred, units, true), 33) << units;
  }
  for (const int preferred : {2, 3, 4, 5, 8, 12}) {
    for (int64_t units = 2; units < 5000; ++units) {
      EXPECT_LE(needed_partials(66, 1, preferred, units, false), 33) << units;
    }
  }
  for (int64_t units = 1; units < 14; ++units)
    EXPECT_LE(needed_partials(66, 2, 16, units, true), 132) << units;
}

// Groups hold no more rows than stay in L2 wherever units can be cut so.
TEST(TileSchedule, GroupsAreNoLargerThanPreferred) {
  for (const int preferred : {2, 3, 4, 8}) {
    const Raster raster = make_raster(66, 1, preferred, kUnlimited);
    EXPECT_EQ(raster.main.units, preferred);
    for (int units = 4; units < raster.tail_units + preferred; units += 2) {
      for (const RasterGroup& group : raster.tails[units].groups) EXPECT_LE(group.units, preferred) << units;
    }
  }
  // 8192 rows at a depth of 2304: two groups.
  EXPECT_EQ(make_raster(66, 2, 16, kUnlimited).main.units, 16);
}

TEST(TileSchedule, LastTileOfALargeProblem) {
  const Raster raster = make_raster(66, 2, 12, kUnlimited);
  const int units = 4096, column_tiles = 250000;  // 2^30 tiles
  const TileSchedule schedule(raster, units, column_tiles);
  const Tile last = schedule.at(schedule.tiles() - 1);
  EXPECT_EQ(last.unit, units - 1);
  EXPECT_EQ(last.column, column_tiles - 1);
}

}  // namespace
}  // namespace logitless::cuda::fused
