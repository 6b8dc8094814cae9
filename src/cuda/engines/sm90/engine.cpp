#include "cuda/engines/sm90/engine.h"

#include "cuda/engines/sm90/launch.h"
#include "cuda/plan/sizes.h"

namespace logitless::cuda::sm90 {
namespace {

class Sm90 final : public Engine {
 public:
  const char* name() const override { return "sm90"; }

  EngineTraits traits() const override {
    return {.base_2 = true,
            .anchors_first = true,
            .keeps_windows = true,
            .sums_while_drawing = true,
            .needs_scratch = false,
            .draw_cost = 1,
            .top_tile = kTileColumns,
            .top_groups = kTopGroups,
            .slot_columns = kTileColumns};
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

  int slots(const LogitsArgs& args, const Device& device) const override {
    return plan_logits(args, device.processors, /*any_fewer=*/true).slots;
  }

  EngineTiles tiles(const LogitsArgs& args, const Device& device) const override {
    return {config_of_args(args).unit_rows(), kTileColumns, std::max(device.processors / kClusterBlocks, 1)};
  }

  std::string config(const LogitsArgs& args) const override { return describe(config_of_args(args)); }

  // Tiles, one for each pair of processors at a time.
  double seconds(const LogitsArgs& args, const LogitsScratch& /*scratch*/, double /*bytes*/,
                 const KernelTimes& times) const override {
    const EngineTiles tile = tiles(args, times.device());
    const int64_t count = ceil_div(args.rows, tile.rows) * ceil_div(args.columns, tile.columns);
    // Of one processor's half of a tile.
    const double flop = static_cast<double>(tile.rows * tile.columns) * static_cast<double>(args.depth);
    return static_cast<double>(ceil_div(count, tile.at_once)) * flop / times.flop_per_processor() +
           3 * kLaunchSeconds;
  }

  void launch(const LogitsArgs& args, const LogitsScratch& /*scratch*/, const Queue& queue) const override {
    launch_logits(args, queue);
  }

 private:
  static Config config_of_args(const LogitsArgs& args) {
    return config_for(args.epilogue(), args.rows, args.depth);
  }
};

}  // namespace

const Engine& engine() {
  static const Sm90 only;
  return only;
}

}  // namespace logitless::cuda::sm90
