#include <algorithm>

#include "cuda/engines/sm90/sm90_launch.h"

namespace headroom::cuda::sm90 {
namespace {

// Hidden rows of a raster group that stay in L2 beside the classifier tiles that stream through it.
constexpr int64_t kGroupBytes = 20'000'000;

const char* epilogue_name(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kStats:
      return "stats";
    case Epilogue::kExps:
      return "exps";
    case Epilogue::kGradient:
      return "gradient";
    case Epilogue::kThin:
      return "thin";
    case Epilogue::kTop:
      return "top";
  }
  return "";
}

// Cooperative tiles for deep products, unless of few rows many more would be padding. (Of few rows only:
// chunks of one problem, the last included, then have slots enough.)
bool is_cooperative(Epilogue epilogue, int64_t rows, int64_t depth) {
  constexpr int64_t kFewRows = 2048;
  if (depth < kCooperativeDepth || !may_cooperate(epilogue)) return false;
  return rows > kFewRows || (rows - 1) % 512 >= 256;
}

// Whether the plain kernel of the epilogue computes all that is asked for.
bool takes_plain(const StatsArgs& args) {
  return !args.stats.has_options();
}
bool takes_plain(const ExpsArgs& args) {
  return !args.stats.has_options() && args.stats.max == nullptr;
}
bool takes_plain(const GradientArgs& args) {
  return args.b == nullptr && args.c == nullptr;
}
bool takes_plain(const ThinArgs& args) {
  return !args.stats.has_options() && args.stats.max == nullptr;
}
bool takes_plain(const TopArgs& /*args*/) {
  return false;
}

bool is_plain(const LogitsArgs& args) {
  if (args.dtype != DType::kBF16 || !(args.scale > 0) || args.softcap != 0 || args.bias != nullptr ||
      args.inverse_temperature != nullptr)
    return false;
  // The general kernel rounds the logits once more where there is a scale: then what else is asked for would
  // change bits.
  if (args.batch_invariant && args.scale != 1 && args.epilogue() != Epilogue::kGradient) return false;
  return std::visit([](const auto& of_epilogue) { return takes_plain(of_epilogue); }, args.of_epilogue);
}

bool aligned(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

}  // namespace

Config config_for(Epilogue epilogue, int64_t rows, int64_t depth) {
  return config_of(epilogue, is_cooperative(epilogue, rows, depth));
}

LogitsPlan plan_logits(const LogitsArgs& args, int processors, bool any_fewer) {
  LogitsPlan plan;
  plan.instance = {config_for(args.epilogue(), args.rows, args.depth), args.epilogue(), args.dtype,
                   !is_plain(args)};
  plan.clusters = processors / kClusterBlocks;
  const Config& config = plan.instance.config;
  const int64_t unit_bytes = 2 * config.unit_rows() * std::max<int64_t>(args.depth, 1);
  plan.preferred_units = static_cast<int>(std::clamp<int64_t>(kGroupBytes / unit_bytes, 2, kMaxMainUnits));
  plan.units = (args.rows + config.unit_rows() - 1) / config.unit_rows();
  plan.slots = args.batch_invariant
                   ? static_cast<int>((args.column_offset + args.columns + kTileColumns - 1) / kTileColumns)
                   : needed_slots(plan.clusters, config.turns(), plan.preferred_units, plan.units, any_fewer);
  return plan;
}

std::string describe(const LogitsPlan& plan) {
  const Config& config = plan.instance.config;
  return std::string("sm90 ") + epilogue_name(plan.instance.epilogue) +
         (plan.instance.general ? " (general), " : " (plain), ") +
         (config.cooperative ? "cooperative 256 x 192, " : "ping-pong 128 x 192, ") +
         std::to_string(config.stages) + " stages, " + std::to_string(plan.clusters) +
         " clusters of 2, groups of up to " + std::to_string(plan.preferred_units * config.unit_rows()) +
         " rows in L2, " + std::to_string(plan.slots) + " slots a row";
}

std::string describe(const Config& config) {
  return config.cooperative ? "sm90 256x192" : "sm90 ping-pong 128x192";
}

bool supports(const LogitsArgs& args) {
  if (args.dtype != DType::kBF16 && args.dtype != DType::kF16) return false;
  if (args.dtype == DType::kF16 && args.epilogue() == Epilogue::kExps) return false;
  const StoredColumns* stored = stored_by(args);
  return aligned(args.hidden, args.hidden_stride) && aligned(args.classifier, args.classifier_stride) &&
         (stored == nullptr || aligned(stored->data, stored->stride));
}

}  // namespace headroom::cuda::sm90
