#include "cuda/engines/engine.h"

#include <algorithm>

#include "cuda/engines/sm90/launch.h"
#include "cuda/plan/sizes.h"

namespace logitless::cuda::sm90 {
namespace {

// Bytes of a raster group's hidden rows that stay in L2 beside the weight tiles that stream through it.
constexpr int64_t kGroupBytes = 20'000'000;

// Deep products use cooperative tiles, unless most of a tile would be padding. That exception is for at most
// kSeveralRows rows: then chunks of one problem, including the last, have enough partials.
Tiles tiles_for(const LogitsArgs& args, bool may_have_few_rows = true) {
  constexpr int64_t kSeveralRows = 2048;
  const auto has = [&](Tiles tiles) { return has_tiles(tiles, args.epilogue(), args.dtype); };
  if (may_have_few_rows && args.rows <= kFewRows && has(Tiles::kFewRows)) return Tiles::kFewRows;
  const bool fills = args.rows > kSeveralRows || (args.rows - 1) % 512 >= 256;
  return args.depth >= kCooperativeDepth && fills && has(Tiles::kCooperative) ? Tiles::kCooperative
                                                                              : Tiles::kPingPong;
}

LogitsPlan plan_with(Tiles tiles, const LogitsArgs& args, int processors, bool any_fewer) {
  LogitsPlan plan;
  plan.instance = {config_of(tiles, args.epilogue()), args.epilogue(), args.dtype, !is_plain(args)};
  const Config& config = plan.instance.config;
  const int64_t unit_bytes =
      static_cast<int64_t>(size_of(args.dtype)) * config.unit_rows() * std::max<int64_t>(args.depth, 1);
  plan.tiling.workers = processors / config.cluster_blocks();
  plan.tiling.turns = config.turns();
  plan.tiling.preferred_units =
      static_cast<int>(std::clamp<int64_t>(kGroupBytes / unit_bytes, 2, kMaxMainUnits));
  plan.tiling.units = (args.rows + config.unit_rows() - 1) / config.unit_rows();
  plan.partials = partials_of_tiling(args, plan.tiling, any_fewer);
  return plan;
}

}  // namespace

Config config_for(const LogitsArgs& args) {
  return config_of(tiles_for(args), args.epilogue());
}

// The last chunk of a problem may have few rows, and fewer partials than its tiles need for all processors.
LogitsPlan plan_logits(const LogitsArgs& args, int processors, bool any_fewer) {
  const LogitsPlan plan = plan_with(tiles_for(args), args, processors, any_fewer);
  const PartialStats* stats = stats_of(args);
  const bool is_launch = stats != nullptr && stats->sum != nullptr;
  if (!plan.instance.config.has_few_rows() || !is_launch || stats->partials >= plan.partials) return plan;
  return plan_with(tiles_for(args, /*may_have_few_rows=*/false), args, processors, any_fewer);
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
    const Config config = config_for(args);
    return {config.unit_rows(), kTileColumns, std::max(device.processors / config.cluster_blocks(), 1)};
  }

  std::string config(const LogitsArgs& args) const override {
    switch (tiles_for(args)) {
      case Tiles::kCooperative:
        return "sm90 256x192";
      case Tiles::kFewRows:
        return "sm90 ping-pong 64x192";
      default:
        return "sm90 ping-pong 128x192";
    }
  }

  // Each cluster has one tile at a time. 8-bit products have twice the rate of those of 16 bits. No launch
  // takes less than reading the weight.
  double seconds(const LogitsArgs& args, const LogitsScratch& /*scratch*/, double /*bytes*/,
                 const KernelTimes& times) const override {
    const EngineTiles tile = tiles(args, times.device());
    const int64_t count = ceil_div(args.rows, tile.rows) * ceil_div(args.columns, tile.columns);
    // One processor's part of a tile.
    const double flop = 2.0 * static_cast<double>(config_for(args).loaded_rows() * tile.columns * args.depth);
    const double rate = times.flop_per_processor() * (args.dtype == DType::kE4M3 ? 2 : 1);
    const double products = static_cast<double>(ceil_div(count, tile.at_once)) * flop / rate;
    const double reading = times.moved(args.columns, args.depth, static_cast<double>(size_of(args.dtype)));
    return std::max(products, reading) + 3 * kLaunchSeconds;
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
