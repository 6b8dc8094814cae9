#include "cuda/sm90/tile_schedule.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace headroom::cuda::sm90 {
namespace {

constexpr int kUnlimited = 255;
// With fewer units than this the slots of all clusters' workers would be many; what they compute is so little
// that fewer clusters do.
constexpr int64_t kFewUnits = 14;
// Tails of at least so many units can be cut in groups of few slots whatever their number.
constexpr int kLeastTail = 24;

int group_slots(int units, int workers) {
  return workers / std::gcd(units, workers);
}

// Of the sizes near the preferred one that with the fewest slots, the larger of equals.
int main_units(int workers, int preferred) {
  const int most = std::clamp(preferred, 4, kMaxMainUnits);
  int best = most;
  for (int units = most; units >= std::max(4, most / 2); --units) {
    if (group_slots(units, workers) < group_slots(best, workers)) best = units;
  }
  return best;
}

// Cuts of every number of units in at most kTailGroups groups: fewest slots first, then fewest groups.
struct Cut {
  int slots = kUnlimited + 1;
  int group = 0;  // the last one
};
using Cuts = std::array<std::array<Cut, kTails>, kTailGroups + 1>;  // by number of groups

Cuts cut_tails(int workers, int most_units, int tails) {
  Cuts cuts{};
  cuts[0][0] = {0, 0};
  for (int size = 1; size <= most_units; ++size) {
    const int slots = group_slots(size, workers);
    if (slots > kUnlimited) continue;
    for (int count = 1; count <= kTailGroups; ++count) {
      for (int units = size; units < tails; ++units) {
        const int with = std::max(slots, cuts[count - 1][units - size].slots);
        if (with < cuts[count][units].slots) cuts[count][units] = {with, size};
      }
    }
  }
  return cuts;
}

RasterTail tail_of(const Cuts& cuts, int units, int workers, int clusters) {
  RasterTail tail;
  tail.clusters = static_cast<uint8_t>(clusters);
  int count = 1;
  for (int more = 2; more <= kTailGroups; ++more) {
    if (cuts[more][units].slots < cuts[count][units].slots) count = more;
  }
  for (int index = 0; count > 0 && cuts[count][units].slots <= kUnlimited; --count, ++index) {
    const int size = cuts[count][units].group;
    tail.groups[index] = {static_cast<uint8_t>(size), static_cast<uint8_t>(group_slots(size, workers))};
    units -= size;
  }
  return tail;
}

int tail_slots(const RasterTail& tail) {
  int slots = 1;
  for (const RasterGroup& group : tail.groups) slots = std::max<int>(slots, group.slots);
  return slots;
}

// One group for all units and as many clusters as the slots allow.
RasterTail restricted_tail(int units, int clusters, int turns, int most_slots) {
  while (clusters > 1 && group_slots(units, clusters * turns) > most_slots) --clusters;
  RasterTail tail;
  tail.groups[0] = {static_cast<uint8_t>(units), static_cast<uint8_t>(group_slots(units, clusters * turns))};
  tail.clusters = static_cast<uint8_t>(clusters);
  return tail;
}

}  // namespace

Raster make_raster(int clusters, int turns, int preferred, int most_slots) {
  clusters = std::min(clusters, kUnlimited / turns);
  const int workers = clusters * turns;
  Raster raster;
  const int main = main_units(workers, preferred);
  raster.main = {static_cast<uint8_t>(main), static_cast<uint8_t>(group_slots(main, workers))};
  const int tail_groups = std::max(2, (kLeastTail + main - 1) / main);
  raster.tail_units = tail_groups * main;
  const int tails = raster.tail_units + main;
  // A tail may hold groups up to twelve units where the main ones are smaller: 11 units need few slots.
  const int most_units = std::max(main, std::min(12, kMaxMainUnits));
  const Cuts cuts = cut_tails(workers, most_units, tails);
  raster.tails[0].clusters = static_cast<uint8_t>(clusters);
  for (int units = 1; units < tails; ++units) {
    raster.tails[units] = tail_of(cuts, units, workers, clusters);
    const bool cut = raster.tails[units].groups[0].units > 0;
    if (!cut || tail_slots(raster.tails[units]) > most_slots) {
      raster.tails[units] = restricted_tail(units, clusters, turns, most_slots);
    }
  }
  return raster;
}

int raster_slots(const Raster& raster, int64_t units) {
  const int main = raster.main.units;
  if (units < raster.tail_units + main) return tail_slots(raster.tails[units]);
  const int64_t tail = raster.tail_units + (units - raster.tail_units) % main;
  return std::max<int>(raster.main.slots, tail_slots(raster.tails[tail]));
}

int needed_slots(int clusters, int turns, int preferred, int64_t units, bool any_fewer) {
  const Raster raster = make_raster(clusters, turns, preferred, kUnlimited);
  if (!any_fewer) return raster_slots(raster, units);
  int slots = turns;  // what a single cluster needs
  // Beyond the table slots repeat with each further main group.
  const int64_t last_new = raster.tail_units + 2 * raster.main.units;
  for (int64_t fewer = std::min(units, kFewUnits); fewer <= std::min(units, last_new); ++fewer) {
    slots = std::max(slots, raster_slots(raster, fewer));
  }
  return slots;
}

}  // namespace headroom::cuda::sm90
