#include "cuda/engines/fused/tile_schedule.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>

namespace logitless::cuda::fused {
namespace {

constexpr int kUnlimited = 255;
// With fewer units than this, the partials of all clusters' workers would be many. The work is so little that
// fewer clusters suffice.
constexpr int64_t kFewUnits = 14;
// Up to this many partials, saving more does not justify more groups, or groups smaller or larger than
// preferred.
constexpr int kFewPartials = 33;

int group_partials(int units, int workers) {
  return workers / std::gcd(units, workers);
}

// Returns the size near the preferred one that needs the fewest partials; the larger of equals.
int main_units(int workers, int preferred) {
  const int most = std::clamp(preferred, 2, kMaxMainUnits);
  const auto cost = [&](int units) { return std::max(kFewPartials, group_partials(units, workers)); };
  int best = most;
  for (int units = most; units >= std::max(2, most / 2); --units) {
    if (cost(units) < cost(best)) best = units;
  }
  return best;
}

// Cuts of every number of units into at most kTailGroups groups.
struct Cut {
  int partials = kUnlimited + 1;
  int cost = 0;
  int group = 0;  // the last one

  bool exists() const { return partials <= kUnlimited; }
  bool is_better_than(const Cut& other) const {
    return partials < other.partials || (partials == other.partials && cost < other.cost);
  }
};
using Cuts = std::array<std::array<Cut, kTails>, kTailGroups + 1>;  // by number of groups

// Minimizes partials first, with all numbers up to kFewPartials alike; then the number of groups. Groups
// above `main` units are avoided if possible, because their hidden rows would not stay in L2.
Cuts cut_tails(int workers, int main, int tails) {
  Cuts cuts{};
  cuts[0][0] = {0, 0, 0};
  // If main groups are small, tails may need larger ones: 11 units need few partials.
  const int most_units = std::max(main, std::min(12, kMaxMainUnits));
  for (int size = 1; size <= most_units; ++size) {
    const int partials = std::max(kFewPartials, group_partials(size, workers));
    if (partials > kUnlimited) continue;
    const int cost = 1 + 4 * std::max(0, size - main);
    for (int count = 1; count <= kTailGroups; ++count) {
      for (int units = size; units < tails; ++units) {
        const Cut& rest = cuts[count - 1][units - size];
        if (!rest.exists()) continue;
        const Cut with{std::max(partials, rest.partials), rest.cost + cost, size};
        if (with.is_better_than(cuts[count][units])) cuts[count][units] = with;
      }
    }
  }
  return cuts;
}

int best_count(const Cuts& cuts, int units) {
  int count = 1;
  for (int more = 2; more <= kTailGroups; ++more) {
    if (cuts[more][units].is_better_than(cuts[count][units])) count = more;
  }
  return count;
}

// Returns the least multiple of main from which on every number of units can be cut with few partials. If
// there is none, tails are below 24 units. The result is not below kFewUnits, because main groups are for all
// clusters.
int find_tail_units(const Cuts& cuts, int main) {
  const int most = std::max(2, (24 + main - 1) / main) * main;
  int with_few = 0;  // numbers of units in a row, up to here
  for (int units = 1; units < most + main; ++units) {
    with_few = cuts[best_count(cuts, units)][units].partials <= kFewPartials ? with_few + 1 : 0;
    const int first = units + 1 - main;
    if (with_few >= main && first % main == 0 && first >= kFewUnits) return first;
  }
  return most;
}

RasterTail tail_of(const Cuts& cuts, int units, int workers, int clusters) {
  RasterTail tail;
  tail.clusters = static_cast<uint8_t>(clusters);
  int count = best_count(cuts, units);
  for (int index = 0; count > 0 && cuts[count][units].exists(); --count, ++index) {
    const int size = cuts[count][units].group;
    tail.groups[index] = {static_cast<uint8_t>(size), static_cast<uint8_t>(group_partials(size, workers))};
    units -= size;
  }
  return tail;
}

int tail_partials(const RasterTail& tail) {
  int partials = 1;
  for (const RasterGroup& group : tail.groups) partials = std::max<int>(partials, group.partials);
  return partials;
}

// One group for all units, and as many clusters as the partials allow.
RasterTail restricted_tail(int units, int clusters, int turns, int most_partials) {
  while (clusters > 1 && group_partials(units, clusters * turns) > most_partials) --clusters;
  RasterTail tail;
  tail.groups[0] = {static_cast<uint8_t>(units),
                    static_cast<uint8_t>(group_partials(units, clusters * turns))};
  tail.clusters = static_cast<uint8_t>(clusters);
  return tail;
}

Raster solve_raster(int clusters, int turns, int preferred, int most_partials) {
  const int workers = clusters * turns;
  Raster raster;
  const int main = main_units(workers, preferred);
  raster.main = {static_cast<uint8_t>(main), static_cast<uint8_t>(group_partials(main, workers))};
  const Cuts cuts = cut_tails(workers, main, kTails);
  raster.tail_units = find_tail_units(cuts, main);
  const int tails = raster.tail_units + main;
  raster.tails[0].clusters = static_cast<uint8_t>(clusters);
  for (int units = 1; units < tails; ++units) {
    raster.tails[units] = tail_of(cuts, units, workers, clusters);
    const bool cut = raster.tails[units].groups[0].units > 0;
    if (!cut || tail_partials(raster.tails[units]) > most_partials) {
      raster.tails[units] = restricted_tail(units, clusters, turns, most_partials);
    }
  }
  return raster;
}

}  // namespace

const Raster& make_raster(int clusters, int turns, int preferred, int most_partials) {
  using Key = std::tuple<int, int, int, int>;
  struct Solved {
    std::mutex mutex;
    std::map<Key, Raster> rasters;  // at most some dozens for one device
  };
  static Solved* const solved = new Solved;  // runs may outlive static objects
  clusters = std::min(clusters, kUnlimited / turns);
  const Key key{clusters, turns, std::clamp(preferred, 2, kMaxMainUnits),
                std::min(most_partials, kUnlimited)};
  const std::lock_guard lock(solved->mutex);
  const auto at = solved->rasters.find(key);
  if (at != solved->rasters.end()) return at->second;
  const auto& [c, t, p, m] = key;
  return solved->rasters.emplace(key, solve_raster(c, t, p, m)).first->second;
}

int raster_partials(const Raster& raster, int64_t units) {
  const int main = raster.main.units;
  if (units < raster.tail_units + main) return tail_partials(raster.tails[units]);
  const int64_t tail = raster.tail_units + (units - raster.tail_units) % main;
  return std::max<int>(raster.main.partials, tail_partials(raster.tails[tail]));
}

int needed_partials(int clusters, int turns, int preferred, int64_t units, bool any_fewer) {
  const Raster& raster = make_raster(clusters, turns, preferred, kUnlimited);
  if (!any_fewer) return raster_partials(raster, units);
  int partials = turns;  // needed by a single cluster
  // Beyond the table, partials repeat with each further main group.
  const int64_t last_new = raster.tail_units + 2 * raster.main.units;
  for (int64_t fewer = std::min(units, kFewUnits); fewer <= std::min(units, last_new); ++fewer) {
    partials = std::max(partials, raster_partials(raster, fewer));
  }
  return partials;
}

}  // namespace logitless::cuda::fused
