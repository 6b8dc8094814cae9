#include <algorithm>

#include "cuda/engines/sm90/launch.h"

namespace logitless::cuda::sm90 {
namespace {

// Hidden rows of a raster group that stay in L2 beside the classifier tiles that stream through it.
constexpr int64_t kGroupBytes = 20'000'000;

// Cooperative tiles for deep products, unless of few rows many more would be padding. (Of few rows only:
// chunks of one problem, the last included, then have slots enough.)
bool is_cooperative(Epilogue epilogue, int64_t rows, int64_t depth) {
  constexpr int64_t kFewRows = 2048;
  if (depth < kCooperativeDepth || !may_cooperate(epilogue)) return false;
  return rows > kFewRows || (rows - 1) % 512 >= 256;
}

}  // namespace

Config config_for(Epilogue epilogue, int64_t rows, int64_t depth) {
  return config_of(epilogue, is_cooperative(epilogue, rows, depth));
}

LogitsPlan plan_logits(const LogitsArgs& args, int processors, bool any_fewer) {
  LogitsPlan plan;
  plan.instance = {config_for(args.epilogue(), args.rows, args.depth), args.epilogue(), args.dtype,
                   !is_plain(args)};
  const Config& config = plan.instance.config;
  const int64_t unit_bytes = 2 * config.unit_rows() * std::max<int64_t>(args.depth, 1);
  plan.tiling.workers = processors / kClusterBlocks;
  plan.tiling.turns = config.turns();
  plan.tiling.preferred_units =
      static_cast<int>(std::clamp<int64_t>(kGroupBytes / unit_bytes, 2, kMaxMainUnits));
  plan.tiling.units = (args.rows + config.unit_rows() - 1) / config.unit_rows();
  plan.slots = slots_of_tiling(args, plan.tiling, any_fewer);
  return plan;
}

std::string describe(const LogitsPlan& plan) {
  const Config& config = plan.instance.config;
  return std::string("sm90 ") + epilogue_name(plan.instance.epilogue) +
         (plan.instance.general ? " (general), " : " (plain), ") +
         (config.cooperative ? "cooperative 256 x 192, " : "ping-pong 128 x 192, ") +
         std::to_string(config.stages) + " stages, " + std::to_string(plan.tiling.workers) +
         " clusters of 2, groups of up to " +
         std::to_string(plan.tiling.preferred_units * config.unit_rows()) + " rows in L2, " +
         std::to_string(plan.slots) + " slots a row";
}

std::string describe(const Config& config) {
  return config.cooperative ? "sm90 256x192" : "sm90 ping-pong 128x192";
}

}  // namespace logitless::cuda::sm90
