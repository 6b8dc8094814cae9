#include "cuda/engines/engine.h"

#include <algorithm>
#include <cmath>

#include "cuda/engines/mma/launch.h"
#include "cuda/plan/sizes.h"

namespace logitless::cuda::mma {
namespace {

// Time of a tile after its products, measured on an H200: 192 elements in each thread, whose exponentials
// alone keep their units busy for 2 us, and the exchange between warps.
constexpr double kEpilogueSeconds = 2.7e-6;

// The share of a device's product rate that these kernels reach. Hopper: 0.68, measured on an H200, where the
// losses of three heads are within 1% of it. The others are predictions. Devices
// without a faster instruction reach all of it; Blackwell for data centers, with twice Hopper's rate for each
// processor, reaches half of Hopper's share.
double share_of_products(const Device& device) {
  if (device.measured.mma_share > 0) return device.measured.mma_share;
  if (device.capability / 10 == 9) return 0.683;
  return device.capability / 10 == 10 ? 0.32 : 1;
}

// Share of L2 for the hidden rows of a raster group. The weight's tiles, which stream through, use the rest.
constexpr double kGroupShare = 0.4;

// Returns the units of a raster group: as many as stay in L2 while all columns pass. They are at least those
// of a wave of tiles that is about square, which reads the fewest bytes if nothing stays.
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
  plan.partials = partials_of_tiling(args, plan.tiling, any_fewer);
  return plan;
}

namespace {

class Mma final : public Engine {
 public:
  const char* name() const override { return "mma"; }

  EngineTraits traits() const override { return kTraits; }

  std::string why_not_on(const Device& device) const override {
    if (stages_of(device.shared_bytes) > 0) return "";
    return "mma needs " + std::to_string(shared_bytes(kFewStages)) + " bytes of shared memory a block, not " +
           std::to_string(device.shared_bytes);
  }

  std::string why_not_of(DType operands) const override {
    if (operands == DType::kBF16 || operands == DType::kF16) return "";
    return "mma needs both operands in bf16, or both in fp16";
  }

  // On the listed devices mma.sync is the only tensor core instruction that cuBLAS could use as well.
  std::string opt_in_reason(const Device& device) const override {
    for (const int capability : {80, 86, 89, 120}) {
      if (device.capability == capability) return "";
    }
    return "chosen on compute capability 8.0, 8.6, 8.9 and 12.0, not on " + device.capability_text();
  }
  // Hopper alone has run its tests.
  bool is_untried_on(const Device& device) const override { return device.capability != 90; }

  std::string reason() const override { return "16-bit operands without Hopper's instructions"; }

  int partials(const LogitsArgs& args, const Device& device) const override {
    return plan_logits(args, device, /*any_fewer=*/true).partials;
  }

  EngineTiles tiles(const LogitsArgs& /*args*/, const Device& device) const override {
    return {kBlockRows, kTileColumns, std::max(device.processors, 1)};
  }

  std::string config(const LogitsArgs& /*args*/) const override { return "mma 256x192"; }

  // Each processor has one tile at a time, with its epilogue.
  double seconds(const LogitsArgs& args, const LogitsScratch& /*scratch*/, double /*bytes*/,
                 const KernelTimes& times) const override {
    const EngineTiles tile = tiles(args, times.device());
    const int64_t count = ceil_div(args.rows, tile.rows) * ceil_div(args.columns, tile.columns);
    const double flop = 2.0 * static_cast<double>(tile.rows * tile.columns) * static_cast<double>(args.depth);
    const double products = flop / (times.flop_per_processor() * share_of_products(times.device()));
    return static_cast<double>(ceil_div(count, tile.at_once)) * (products + kEpilogueSeconds) +
           3 * kLaunchSeconds;
  }

  void launch(const LogitsArgs& args, const LogitsScratch& /*scratch*/, const Queue& queue) const override {
    launch_logits(args, queue);
  }
};

}  // namespace

const Engine& engine() {
  static const Mma only;
  return only;
}

}  // namespace logitless::cuda::mma
