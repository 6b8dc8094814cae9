#include "cuda/engines/fused/args.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/status.h"

namespace logitless::cuda::fused {
namespace {

bool takes_plain(const StatsArgs& args) {
  return !args.stats.has_options();
}
bool takes_plain(const ExpLogitsArgs& args) {
  return !args.stats.has_options() && args.stats.max == nullptr;
}
bool takes_plain(const GradientArgs& args) {
  return args.b == nullptr && args.c == nullptr;
}
bool takes_plain(const DrawArgs& args) {
  return !args.stats.has_options() && args.stats.max == nullptr;
}
bool takes_plain(const TopArgs& /*args*/) {
  return false;
}

bool takes_plain(const SampleArgs& /*args*/) {
  return false;
}

bool aligned(const void* pointer, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 &&
         stride * static_cast<int64_t>(size_of(dtype)) % 16 == 0;
}

void require(bool condition, const char* what) {
  if (!condition) throw Error(Status::kInternal, what);
}

void check_partials(const LogitsArgs& args, const PartialStats& stats) {
  require(stats.sum == nullptr || (stats.stride >= args.rows && stats.partials >= 1),
          "at least one partial for all rows");
  require(!args.batch_invariant ||
              (stats.partials >= partials_of_tiles(args) && args.column_offset % kTileColumns == 0),
          "a partial for each tile of columns, and windows of whole tiles");
  require(stats.argmax == nullptr || stats.max != nullptr, "argmax needs partials of maxima");
}

void check_statistics(const LogitsArgs& args, const PartialStats& stats) {
  require(stats.sum != nullptr && stats.max != nullptr, "partials of sums and maxima must be given");
  check_partials(args, stats);
}

void check_epilogue(const LogitsArgs& args, const StatsArgs& own) {
  check_statistics(args, own.stats);
}

void check_epilogue(const LogitsArgs& args, const ExpLogitsArgs& own) {
  require(own.stats.sum != nullptr, "partials must be given");
  check_partials(args, own.stats);
  require(own.logit_offset != nullptr, "logit offsets must be given");
  require(own.exp_logits.columns <= args.columns, "more columns are stored than there are");
  if (args.dtype != DType::kF16 || own.exp_logits.columns <= 0) return;
  require(own.exponents.data != nullptr && args.column_offset % kExponentColumns == 0,
          "float16 exp logits need exponents, and windows of whole groups");
}

void check_epilogue(const LogitsArgs& args, const GradientArgs& own) {
  require(own.lse != nullptr && own.a != nullptr && own.g != nullptr, "lse, a and g must be given");
  require(own.dz.columns == args.columns, "dz is stored of all columns");
}

void check_epilogue(const LogitsArgs& args, const DrawArgs& own) {
  check_partials(args, own.stats);
  require(own.logit_offset != nullptr, "logit offsets must be given");
  require(own.draws.elements != nullptr && (own.stats.sum == nullptr || own.stats.expected != nullptr),
          "lists, and partials of expected counts beside the sums', must be given");
}

void check_epilogue(const LogitsArgs& args, const TopArgs& own) {
  if (own.top.group_max != nullptr) return;
  check_statistics(args, own.stats);
  require(own.top.threshold != nullptr && own.top.count != nullptr && own.top.listed != nullptr,
          "thresholds and lists, or room for maxima, must be given");
}

void check_epilogue(const LogitsArgs& args, const SampleArgs& own) {
  check_statistics(args, own.stats);
  require(own.samples.key != nullptr && own.samples.best != nullptr,
          "keys and places of samples must be given");
}

void check_arguments(const LogitsArgs& args, const Tiling& tiling) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 1024;
  require(supports(args), "operands must be 16-bit or e4m3, with rows aligned to 16 bytes");
  require(args.dtype != DType::kE4M3 || (args.row_factor != nullptr && args.column_factor != nullptr),
          "8-bit operands need the factors of rows and columns");
  require(args.rows <= kMost && args.columns <= kMost && args.depth <= kMost, "sizes must be below 2^31");
  require(tiling.units * tiles_of_columns(args.columns) <= kMost, "more than 2^31 tiles");
  const bool takes_mask = args.epilogue() == Epilogue::kTop || args.epilogue() == Epilogue::kSample;
  require(args.mask.words == nullptr || (takes_mask && args.column_offset % 32 == 0),
          "a mask is for the largest logits and samples, and windows of whole words");
  std::visit([&](const auto& own) { check_epilogue(args, own); }, args.of_epilogue);
}

// Returns the partials that sums may go to. There is no limit if no sums are made, or if each tile has its
// own partial.
int partials_of(const LogitsArgs& args) {
  const PartialStats* stats = stats_of(args);
  const bool any = stats == nullptr || stats->sum == nullptr || args.batch_invariant;
  return any ? std::numeric_limits<int>::max() : static_cast<int>(std::min<int64_t>(stats->partials, 1024));
}

Raster make_checked(const LogitsArgs& args, const Tiling& tiling) {
  check_arguments(args, tiling);
  const int partials = partials_of(args);
  Raster raster = make_raster(tiling.workers, tiling.turns, tiling.preferred_units, partials);
  require(tiling.units < raster.tail_units + raster.main.units || raster.main.partials <= partials,
          "too few partials");
  if (args.batch_invariant) raster.first_partial = static_cast<int32_t>(args.column_offset / kTileColumns);
  return raster;
}

}  // namespace

bool is_plain(const LogitsArgs& args) {
  const LogitTransform<float>& t = args.transform;
  const bool has_plain = args.dtype != DType::kF16 || args.epilogue() == Epilogue::kExpLogits;
  if (!has_plain || !(t.scale > 0) || t.softcap != 0 || t.bias != nullptr || t.inverse_temperature != nullptr)
    return false;
  // The general kernel rounds the logits once more if there is a scale. A choice between the two kernels
  // would then let requested options change bits.
  if (args.batch_invariant && t.scale != 1 && args.epilogue() != Epilogue::kGradient) return false;
  return std::visit([](const auto& of_epilogue) { return takes_plain(of_epilogue); }, args.of_epilogue);
}

bool supports(const LogitsArgs& args) {
  const DType dtype = args.dtype;
  const bool is_fp8 =
      dtype == DType::kE4M3 && args.epilogue() != Epilogue::kTop && args.epilogue() != Epilogue::kSample;
  if (dtype != DType::kBF16 && dtype != DType::kF16 && !is_fp8) return false;
  const StoredColumns* stored = stored_by(args);
  return aligned(args.hidden, args.hidden_stride, dtype) && aligned(args.weight, args.weight_stride, dtype) &&
         (stored == nullptr || aligned(stored->data, stored->stride, stored_dtype(dtype)));
}

int64_t partials_of_tiles(const LogitsArgs& args) {
  return tiles_of_columns(args.column_offset + args.columns);
}

int partials_of_tiling(const LogitsArgs& args, const Tiling& tiling, bool any_fewer) {
  if (args.batch_invariant) return static_cast<int>(partials_of_tiles(args));
  return needed_partials(tiling.workers, tiling.turns, tiling.preferred_units, tiling.units, any_fewer);
}

Raster checked_raster(const LogitsArgs& args, const Tiling& tiling, const char* engine) {
  try {
    return make_checked(args, tiling);
  } catch (const Error& error) {
    throw Error(error.status(), std::string(engine) + " logits: " + error.what());
  }
}

}  // namespace logitless::cuda::fused
