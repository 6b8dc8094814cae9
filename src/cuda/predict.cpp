#include "cuda/predict.h"

#include <algorithm>
#include <utility>

#include "cuda/gemm.h"
#include "cuda/sizes.h"
#include "cuda/sm90/logits.h"
#include "cuda/thinned/sizes.h"

namespace headroom::cuda {
namespace {

constexpr double kFlopPerProcessor = 5.3e12;  // bf16 products of whole waves, sustained
constexpr double kFloat32Share = 0.06;        // of that rate: fp32 is not rounded to tf32
constexpr double kBytesPerSecond = 4e12;
constexpr double kLaunchSeconds = 4e-6;
constexpr double kChunkRounding = 0.04;  // of the time: what one rounding more of d_classifier must be worth

// Thinned gradients: what a kept element costs, and each number of its two rows in the gathers, by seven
// heads of a flat softmax; a margin, as products run up to 15% faster than the rate above in a burst and
// gathers do not.
constexpr double kElementSeconds = 0.1e-9, kGatherSeconds = 0.44e-12, kProcessorsMeasured = 132;
constexpr double kThinnedLaunches = 80, kThinnedMargin = 1.1;
constexpr double kPortableDraw = 2.5;  // of the pass that makes the logits

// Tiles that cuBLASLt's products come in.
constexpr std::pair<int64_t, int64_t> kTiles[] = {{256, 128}, {128, 256}, {192, 192},
                                                  {320, 128}, {128, 192}, {128, 128}};

class Prediction {
 public:
  Prediction(const Problem& problem, const PlanDetail& detail, const Device& device)
      : p_(problem),
        d_(detail),
        processors_(std::max(device.processors, 1)),
        rate_(kFlopPerProcessor * (operand_dtype(problem) == DType::kF32 ? kFloat32Share : 1)) {}

  // The last wave of tiles costs as much as a full one.
  double product(int64_t m, int64_t n, int64_t k) const {
    double best = 0;
    for (const auto& [rows, columns] : kTiles) {
      const int64_t waves = ceil_div(ceil_div(m, rows) * ceil_div(n, columns), processors_);
      const double flop = 2.0 * static_cast<double>(rows * columns) * static_cast<double>(k);
      const double penalty = rows * columns < 128 * 192 ? 1.1 : 1;  // more bytes for each FLOP
      const double seconds = static_cast<double>(waves) * flop / rate_ * penalty;
      if (best == 0 || seconds < best) best = seconds;
    }
    return best + kLaunchSeconds;
  }

  // The fused kernel's tiles, one for each pair of processors at a time.
  double fused(int64_t rows, int64_t columns) const {
    const int64_t unit = sm90::config_for(Epilogue::kStats, rows, p_.hidden).unit_rows();
    const int64_t tiles = ceil_div(rows, unit) * ceil_div(columns, sm90::kTileColumns);
    // Of one processor's half of a tile.
    const double flop = static_cast<double>(unit * sm90::kTileColumns) * static_cast<double>(p_.hidden);
    return static_cast<double>(ceil_div(tiles, processors_ / 2)) * flop / rate_ + 2 * kLaunchSeconds;
  }

  // Logits of a chunk and what becomes of them, `bytes` written for each.
  double logits(int64_t rows, int64_t columns, double bytes) const {
    double seconds =
        d_.implementation == Implementation::kSm90 ? fused(rows, columns) : product(rows, columns, p_.hidden);
    if (d_.implementation == Implementation::kPortable) {
      const double blocks =
          static_cast<double>(ceil_div(rows, d_.scratch_rows) * ceil_div(columns, d_.scratch_columns));
      seconds += moved(rows, columns, 12 + bytes) + 2 * kLaunchSeconds * blocks;
    }
    if (d_.copies_classifier) seconds += moved(columns, p_.hidden, 6);
    return seconds + kLaunchSeconds;
  }

  double gradients(int64_t rows, int64_t columns, bool adds_d_hidden) const {
    double seconds = 2 * kLaunchSeconds;
    if (p_.want_d_hidden) {
      seconds += product(rows, p_.hidden, columns);
      if (adds_d_hidden) seconds += moved(rows, p_.hidden, 8);
    }
    if (p_.want_d_classifier) seconds += product(columns, p_.hidden, rows);
    if (p_.want_d_bias) seconds += moved(rows, columns, 2);
    return seconds;
  }

  // Of a flat softmax, which keeps 1 / threshold elements a row: no other keeps more.
  double thinned(int64_t rows, const ThinSizes& s) const {
    const auto size = static_cast<double>(size_of(operand_dtype(p_)));
    double seconds = kThinnedLaunches * kLaunchSeconds;
    if (p_.needs_forward() || !p_.keeps_draws) {
      seconds +=
          logits(rows, p_.vocab, 0) * (d_.implementation == Implementation::kPortable ? kPortableDraw : 1);
    }
    if (!p_.needs_backward()) return seconds * kThinnedMargin;
    const double kept_of_row = std::min(1 / p_.threshold, static_cast<double>(p_.vocab - s.dense));
    const double of_element = kElementSeconds + kGatherSeconds * size / 2 * static_cast<double>(p_.hidden);
    seconds += static_cast<double>(rows) * kept_of_row * of_element * kProcessorsMeasured /
               static_cast<double>(processors_);
    seconds +=
        logits(rows, s.dense, size) + gradients(rows, s.dense + s.hot, false) + moved(p_.vocab, p_.hidden, 2);
    return seconds * kThinnedMargin;
  }

  double moved(int64_t rows, int64_t columns, double bytes) const {
    return static_cast<double>(rows) * static_cast<double>(columns) * bytes / kBytesPerSecond;
  }

 private:
  const Problem& p_;
  const PlanDetail& d_;
  const int64_t processors_;
  const double rate_;
};

}  // namespace

double predict_seconds(const Problem& p, PlanKind kind, int64_t chunk, const PlanDetail& d,
                       const Device& device) {
  const Prediction predict(p, d, device);
  const int64_t tokens = std::max<int64_t>(p.tokens, 1), rows = chunk;
  const auto chunks = static_cast<double>(ceil_div(tokens, rows));
  const double exps = static_cast<double>(size_of(operand_dtype(p)));
  double seconds = 20 * kLaunchSeconds;
  if (p.needs_forward()) seconds += predict.logits(rows, p.vocab, d.kept_columns > 0 ? exps : 0);
  if (kind == PlanKind::kThinned) {
    seconds = predict.thinned(rows, thin_sizes(p));
  } else if (p.needs_backward()) {
    const auto windows = [&](int64_t first, int64_t end, int64_t width, bool kept) {
      const auto window = [&](int64_t columns, bool adds) {
        return (kept ? 0 : predict.logits(rows, columns, exps)) + predict.gradients(rows, columns, adds);
      };
      const int64_t whole = (end - first) / width, rest = (end - first) % width;
      if (whole > 0) seconds += window(width, first > 0);
      if (whole > 1) seconds += static_cast<double>(whole - 1) * window(width, true);
      if (rest > 0) seconds += window(rest, first + whole > 0);
    };
    if (d.kept_columns > 0) windows(0, d.kept_columns, kept_window(p, d), true);
    windows(d.kept_columns, p.vocab, d.vocab_window, false);
    if (d.kept_columns > 0 && d.kept_columns < p.vocab) {
      seconds += predict.moved(rows, p.hidden, 8 + 2 * exps) + 8 * kLaunchSeconds;
    }
    if (chunks > 1 && p.want_d_classifier) {
      seconds += predict.moved(p.vocab, p.hidden, d.rounds_between_chunks ? 2 : 8);
    }
  }
  seconds *= chunks;
  if (d.rounds_between_chunks) seconds *= 1 + kChunkRounding * (chunks - 1);
  // Less room for split-K sums costs little, but something: the larger one is taken where it fits.
  return seconds + (d.gemm_bytes < static_cast<int64_t>(kGemmScratchBytes) && p.needs_backward() ? 10e-6 : 0);
}

}  // namespace headroom::cuda
