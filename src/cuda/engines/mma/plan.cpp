#include <algorithm>
#include <cmath>

#include "cuda/engines/mma/launch.h"

namespace logitless::cuda::mma {
namespace {

// Of L2, for the hidden rows of a raster group; the rest is for the classifier's tiles that stream through
// it.
constexpr double kGroupShare = 0.4;

// Units of a raster group: as many as stay in L2 while all columns pass, at least those of a wave of tiles
// that is about as long as it is wide, which reads the fewest bytes where nothing stays.
int preferred_units(int64_t depth, const Device& device) {
  const double unit_bytes = 2.0 * kBlockRows * static_cast<double>(std::max<int64_t>(depth, 1));
  const double staying = kGroupShare * static_cast<double>(device.l2_bytes) / unit_bytes;
  const double square = std::sqrt(static_cast<double>(device.processors) * kTileColumns / kBlockRows);
  return static_cast<int>(std::clamp(std::max(staying, square), 2.0, static_cast<double>(kMaxMainUnits)));
}

}  // namespace

LogitsPlan plan_logits(const LogitsArgs& args, const Device& device, bool any_fewer) {
  LogitsPlan plan;
  plan.instance = {args.epilogue(), args.dtype, !is_plain(args)};
  plan.stages = stages_of(device.shared_bytes);
  plan.tiling.workers = std::max(device.processors, 1);
  plan.tiling.preferred_units = preferred_units(args.depth, device);
  plan.tiling.units = (args.rows + kBlockRows - 1) / kBlockRows;
  plan.slots = slots_of_tiling(args, plan.tiling, any_fewer);
  return plan;
}

std::string describe(const LogitsPlan& plan) {
  return std::string("mma ") + epilogue_name(plan.instance.epilogue) +
         (plan.instance.general ? " (general), " : " (plain), ") + "256 x 192, " +
         std::to_string(plan.stages) + " stages, " + std::to_string(plan.tiling.workers) +
         " blocks, groups of up to " + std::to_string(plan.tiling.preferred_units * kBlockRows) +
         " rows in L2, " + std::to_string(plan.slots) + " slots a row";
}

}  // namespace logitless::cuda::mma
