#include "cuda/engines/engine.h"

#include <algorithm>

#include "cuda/engines/sm90/launch.h"
#include "cuda/plan/sizes.h"

namespace logitless::cuda::sm90 {
namespace {

// Bytes of a raster group's hidden rows that stay in L2 beside the weight tiles that stream through it.
constexpr int64_t kGroupBytes = 20'000'000;

// Deep products use cooperative tiles, unless there are few rows and most of a tile would be padding. The
// exception is for few rows only: then chunks of one problem, including the last, have enough partials.
bool is_cooperative(const LogitsArgs& args) {
  constexpr int64_t kFewRows = 2048;
  if (args.depth < kCooperativeDepth || !may_cooperate(args.epilogue(), args.dtype)) return false;
  return args.rows > kFewRows || (args.rows - 1) % 512 >= 256;
}

}  // namespace

Config config_for(const LogitsArgs& args) {
  return config_of(args.epilogue(), is_cooperative(args));
}

LogitsPlan plan_logits(const LogitsArgs& args, int processors, bool any_fewer) {
  LogitsPlan plan;
  plan.instance = {config_for(args), args.epilogue(), args.dtype, !is_plain(args)};
  const Config& config = plan.instance.config;
  const int64_t unit_bytes =
      static_cast<int64_t>(size_of(args.dtype)) * config.unit_rows() * std::max<int64_t>(args.depth, 1);
  plan.tiling.workers = processors / kClusterBlocks;
  plan.tiling.turns = config.turns();
  plan.tiling.preferred_units =
      static_cast<int>(std::clamp<int64_t>(kGroupBytes / unit_bytes, 2, kMaxMainUnits));
  plan.tiling.units = (args.rows + config.unit_rows() - 1) / config.unit_rows();
  plan.partials = partials_of_tiling(args, plan.tiling, any_fewer);
  return plan;
}

namespace {

class Sm90 final : public Engine {
 public:
  const char* name() const override { return "sm90"; }

  EngineTraits traits() const override {
    EngineTraits traits = kTraits;
    traits.has_e4m3 = true;
    return traits;
  }

  std::string why_not_on(const Device& device) const override {
    if (device.capability == 90) return "";
    return "sm90 needs compute capability 9.0, not " + device.capability_text();
  }

  std::string why_not_of(DType operands) const override {
    if (operands == DType::kBF16 || operands == DType::kF16) return "";
    return "sm90 needs both operands in bf16, or both in fp16";
  }

  std::string reason() const override { return "compute capability 9.0, 16-bit operands"; }

  int partials(const LogitsArgs& args, const Device& device) const override {
    return plan_logits(args, device.processors, /*any_fewer=*/true).partials;
  }

  EngineTiles tiles(const LogitsArgs& args, const Device& device) const override {
    return {config_for(args).unit_rows(), kTileColumns, std::max(device.processors / kClusterBlocks, 1)};
  }

  std::string config(const LogitsArgs& args) const override {
    return config_for(args).cooperative ? "sm90 256x192" : "sm90 ping-pong 128x192";
  }

  // Each pair of processors has one tile at a time. 8-bit products have twice the rate of those of 16 bits.
  double seconds(const LogitsArgs& args, const LogitsScratch& /*scratch*/, double /*bytes*/,
                 const KernelTimes& times) const override {
    const EngineTiles tile = tiles(args, times.device());
    const int64_t count = ceil_div(args.rows, tile.rows) * ceil_div(args.columns, tile.columns);
    // One processor's half of a tile.
    const double flop = static_cast<double>(tile.rows * tile.columns) * static_cast<double>(args.depth);
    const double rate = times.flop_per_processor() * (args.dtype == DType::kE4M3 ? 2 : 1);
    return static_cast<double>(ceil_div(count, tile.at_once)) * flop / rate + 3 * kLaunchSeconds;
  }

  void launch(const LogitsArgs& args, const LogitsScratch& /*scratch*/, const Queue& queue) const override {
    launch_logits(args, queue);
  }
};

}  // namespace

const Engine& engine() {
  static const Sm90 only;
  return only;
}

}  // namespace logitless::cuda::sm90
