#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/sparsification.h"
#include "core/targets.h"
#include "cpu/sparsified/sparsified.h"

namespace logitless::cpu {
namespace {

// An estimate that is not above any logit: q is at least 1, so a block without any lse estimate is kept as a
// whole. It is not -inf, whose distance from a logit of -inf is NaN.
constexpr float kNoEstimate = std::numeric_limits<float>::lowest();

// Subtracted from lse estimates. One above lse would also draw elements of p >= threshold. Estimates are sums
// in an order of their own, so they may be off in their last bits.
constexpr float kEstimateMargin = 0x1p-10f;

// Returns a float below the known part of lse by more than its own rounding. A group draws elements once.
// There the margin also covers the rounding of exp logits, so that everything that lse would keep is drawn.
float estimate_below(const Problem& p, double known) {
  if (p.in_group()) known -= kEstimateMargin;
  return std::max(static_cast<float>(known - std::fabs(known) * 0x1p-20), kNoEstimate);
}

// Returns the target's logit: a lower bound of lse, and after training not far below it.
float first_estimate(const Runner& run, const Chunk& chunk, int64_t i) {
  const Problem& p = run.problem;
  if (p.screens()) return kNoEstimate;  // an exact logit may be above lse8
  const int64_t row = run.arena.rows[static_cast<size_t>(chunk.first + i)];
  const int64_t target = run.arena.target[static_cast<size_t>(i)];
  if (target < 0) return kNoEstimate;
  const double z = logit_of(run, row, target);
  if (!std::isfinite(z)) return kNoEstimate;
  return estimate_below(p, z - kEstimateMargin);
}

// Bounds of lse are lowered by this, so that their own rounding never leaves out what lse would keep.
constexpr double kBoundMargin = 0x1p-10;

// log(exp(a) + exp(b)) of maxima and logs of sums.
LogSumExp<double> sum_of(LogSumExp<double> a, LogSumExp<double> b) {
  if (b.high > a.high) std::swap(a, b);
  if (b.high == -INFINITY) return a;
  return {a.high, a.low + std::log1p(std::exp((b.high - a.high) + (b.low - a.low)))};
}

// Makes the second draw with this lse: keeps a part of the list and returns its length.
int32_t draw_again(const Runner& run, int64_t i, SparseElement* list, int32_t count,
                   const LogSumExp<double>& lse) {
  int32_t kept = 0;
  for (int32_t k = 0; k < count; ++k) {
    if (reweight(run, i, list[k], lse).weight != 0) list[kept++] = list[k];
  }
  return kept;
}

// Any worker with a block of a row adds the row's elements, in any order, under the row's lock.
// A list that has no room is sparsified first, by the second draw with what is known of the row's lse by
// then; core/sparsification.h says why that changes nothing in the end. The list then has at most
// sparsified_row_capacity() elements, but for a probability of 2e-28. One more block always fits behind them.

// Elements of one block that the first draw kept, and the block's lse.
struct BlockDraw {
  int64_t first_column = 0;
  const int32_t* columns = nullptr;
  const float* logits = nullptr;
  int64_t count = 0;
  LogSumExp<double> lse;
};
void add_to_list(const Runner& run, const Chunk& chunk, int64_t chunk_row, const BlockDraw& drawn) {
  const SparsifiedArena& t = run.arena.sparsified;
  const int64_t i = chunk.first + chunk_row;
  RowDraw& row = t.row_draws[static_cast<size_t>(chunk_row)];
  SparseElement* list = t.row(t.draws.elements, i).data();
  int32_t& count = t.draws.count[static_cast<size_t>(i)];
  const RowLock lock(row.lock);
  row.known = sum_of(row.known, drawn.lse);
  const int64_t room = t.capacity - 1;  // one is for the target
  if (count + drawn.count > room) {
    const int64_t window = draw_window_of(drawn.first_column / run.shape.vocab_block);
    const double lse_estimate = t.draws.lse_estimate[static_cast<size_t>(window * run.problem.tokens + i)];
    LogSumExp<double> bound =
        row.known.log_p(lse_estimate) > 0 ? LogSumExp<double>{lse_estimate, 0} : row.known;
    bound.low -= kBoundMargin;
    count = draw_again(run, i, list, count, bound);
    // This has the probability 2e-28, see above, but memory safety is not left to chance. No logit of the
    // list is above bound.high, so raising bound.low leaves nothing in the end. Infinite and NaN bounds end
    // here as well.
    while (count + drawn.count > room) {
      bound.low += std::numbers::ln2;
      count = std::isfinite(bound.value()) ? draw_again(run, i, list, count, bound) : 0;
    }
  }
  for (int64_t k = 0; k < drawn.count; ++k) {
    list[count++] = {static_cast<int32_t>(drawn.first_column + drawn.columns[k]), drawn.logits[k]};
  }
}

// Sparsifies, after the whole pass, the list of row i (of those that are not ignored) by its lse here, and
// sorts it by column.
void settle_list(const Runner& run, int64_t i, const LogSumExp<double>& lse) {
  const SparsifiedArena& t = run.arena.sparsified;
  SparseElement* list = t.row(t.draws.elements, i).data();
  int32_t& count = t.draws.count[static_cast<size_t>(i)];
  count = draw_again(run, i, list, count, {lse.high, lse.low - kBoundMargin});
  std::sort(list, list + count,
            [](const SparseElement& a, const SparseElement& b) { return a.index < b.index; });
}

}  // namespace

double logit_of(const Runner& run, int64_t row, int64_t column) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  const float dot = run.kernels.dot_rows(run.hidden_from(row), run.weight_from(column), p.hidden);
  const double bias = p.has.bias ? p.bias_scale * load_as_double(b.bias, p.dtype.bias, column) : 0;
  return logit_transform<double>(p).logit(dot, bias, inverse_temperature_of_row(p, b, row));
}

void begin_draws(const Runner& run, const Chunk& chunk, const Range& rows) {
  const Draws& d = run.arena.sparsified.draws;
  for (int64_t i = rows.start; i < rows.end; ++i) {
    const auto at = static_cast<size_t>(chunk.first + i);
    d.count[at] = 0;
    // A backward pass knows lse itself; for shards it is the lse of all columns.
    if (run.problem.pass == Pass::kBackward) {
      const double lse = load_as_double(run.buffers.lse, run.problem.stats_dtype(), run.arena.rows[at]);
      d.lse_estimate[at] = std::isfinite(lse) ? estimate_below(run.problem, lse) : kNoEstimate;
    } else {
      d.lse_estimate[at] = first_estimate(run, chunk, i);
    }
  }
}

void begin_draw_window(const Runner& run, const Chunk& chunk, int64_t start, const Range& rows) {
  const Draws& d = run.arena.sparsified.draws;
  const int64_t window = draw_window_of(start) * run.problem.tokens;
  for (int64_t i = rows.start; i < rows.end; ++i) {
    const LogSumExp<double> known = log_sum_exp_parts(run.arena.stats[static_cast<size_t>(i)]);
    run.arena.sparsified.row_draws[static_cast<size_t>(i)] = {0, known};
    if (start == 0) continue;
    float lse_estimate = d.lse_estimate[static_cast<size_t>(chunk.first + i)];
    if (run.problem.needs_forward() && std::isfinite(known.value())) {
      lse_estimate = std::max(lse_estimate, estimate_below(run.problem, known.value()));
    }
    d.lse_estimate[static_cast<size_t>(window + chunk.first + i)] = lse_estimate;
  }
}

void draw_strip(const Runner& run, const Chunk& chunk, WorkerArena& w, const LogitStrip& strip,
                const BlockStats& stats, int64_t block, int64_t row) {
  const Problem& p = run.problem;
  const Draws& d = run.arena.sparsified.draws;
  const int64_t first_column = block * run.shape.vocab_block;
  const float* lse_estimate = d.lse_estimate.data() + draw_window_of(block) * p.tokens + chunk.first + row;
  const auto threshold = static_cast<float>(p.threshold);
  const auto seed = static_cast<uint64_t>(d.seed[0]);
  const auto first_stream = static_cast<uint32_t>(p.vocab_start + first_column);
  const bool each = p.in_group();
  float sum[kMaxStripRows];
  for (int i = 0; i < strip.rows; ++i) sum[i] = stats.max[i] - lse_estimate[i];
  run.kernels.exp_row(sum, strip.rows, sum);
  for (int i = 0; i < strip.rows; ++i) {
    const auto source = static_cast<uint32_t>(run.arena.rows[static_cast<size_t>(chunk.first + row + i)]);
    const float largest = sum[i];
    sum[i] *= stats.sum_exp[i];  // sum of q over all columns
    const float offset = draw_uniform(draw_bits(seed, source, kFirstDrawStream + first_stream));
    constexpr float kBelow = 1 - 0x1p-16f;  // further than the rounding of sums and exp logits
    constexpr float kLeastUniform = 0x1p-24f;
    // Most blocks of most rows end here: the draw does not reach its first multiple of the threshold.
    if (each ? largest < threshold * (kLeastUniform * kBelow)
             : sum[i] + offset * threshold < threshold * kBelow) {
      continue;
    }
    DrawRow draw;
    draw.row_bits = draw_row_bits(seed, source);
    draw.stream = first_stream;
    draw.seed = seed;
    draw.z = strip.z + i * strip.stride;
    draw.padded_columns = strip.padded_columns;
    draw.lse_estimate = lse_estimate[i];
    draw.threshold = threshold;
    draw.offset = offset;
    draw.q = w.sparsified.q.data();
    draw.columns = w.columns.data();
    draw.logits = w.element_logits.data();
    const int64_t count = (each ? run.kernels.draw_each_row : run.kernels.draw_row)(draw);
    if (count == 0) continue;
    const LogSumExp<double> lse{stats.max[i], std::log(stats.sum_exp[i])};
    add_to_list(run, chunk, row + i, {first_column, draw.columns, draw.logits, count, lse});
  }
}

void settle_draws(const Runner& run, const Chunk& chunk, const Range& rows) {
  if (run.problem.screens()) settle_screen(run, chunk, rows);
  const Draws& d = run.arena.sparsified.draws;
  for (int64_t i = rows.start; i < rows.end; ++i) {
    const RowStats<double>& stats = run.arena.stats[static_cast<size_t>(i)];
    d.target_logit[static_cast<size_t>(chunk.first + i)] = static_cast<float>(stats.target_logit);
    if (run.problem.has.saved) settle_list(run, chunk.first + i, log_sum_exp_parts(stats));
  }
}

ElementWeight reweight(const Runner& run, int64_t i, const SparseElement& element,
                       const LogSumExp<double>& lse) {
  const Draws& d = run.arena.sparsified.draws;
  const Problem& p = run.problem;
  const auto threshold = static_cast<float>(p.threshold);
  const int64_t window = draw_window_of(element.index / run.shape.vocab_block);
  const double lse_estimate = d.lse_estimate[static_cast<size_t>(window * p.tokens + i)];
  const auto probability = static_cast<float>(std::exp(lse.log_p(element.value)));
  const auto p_over_q = static_cast<float>(std::exp(lse.log_p(lse_estimate)));
  const uint32_t bits = draw_bits(static_cast<uint64_t>(d.seed[0]),
                                  static_cast<uint32_t>(run.arena.rows[static_cast<size_t>(i)]),
                                  static_cast<uint32_t>(p.vocab_start + element.index));
  if (p.in_group()) return {second_draw(probability, threshold, draw_uniform(bits)), probability};
  return {sparsified_weight(probability, p_over_q, threshold, draw_uniform(bits)), probability};
}

}  // namespace logitless::cpu
