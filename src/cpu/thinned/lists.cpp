#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/thinning.h"
#include "cpu/thinned/thinned.h"

namespace logitless::cpu {
namespace {

// Bounds of lse are lowered by this, so that their own rounding never leaves out what lse would keep.
constexpr double kBoundMargin = 0x1p-10;

// log(exp(a) + exp(b)) of maxima and logs of sums.
LogSumExp<double> sum_of(LogSumExp<double> a, LogSumExp<double> b) {
  if (b.high > a.high) std::swap(a, b);
  if (b.high == -INFINITY) return a;
  return {a.high, a.low + std::log1p(std::exp((b.high - a.high) + (b.low - a.low)))};
}

// What of the list the second draw keeps, if lse is this.
int32_t thin(const Runner& run, int64_t i, SparseElement* list, int32_t count, const LogSumExp<double>& lse) {
  int32_t kept = 0;
  for (int32_t k = 0; k < count; ++k) {
    if (weigh(run, i, list[k], lse).weight != 0) list[kept++] = list[k];
  }
  return kept;
}

}  // namespace

void add_to_list(const Runner& run, const Chunk& chunk, int64_t chunk_row, const BlockDraw& drawn) {
  const ThinnedArena& t = run.arena.thinned;
  const int64_t i = chunk.first + chunk_row;
  RowDraw& row = t.row_draws[static_cast<size_t>(chunk_row)];
  SparseElement* list = t.row(t.draws.elements, i).data();
  int32_t& count = t.draws.count[static_cast<size_t>(i)];
  const RowLock lock(row.lock);
  row.known = sum_of(row.known, drawn.lse);
  const int64_t room = t.capacity - 1;  // one is for the target
  if (count + drawn.count > room) {
    const int64_t window = draw_window_of(drawn.first_column / run.shape.vocab_block);
    const double guess = t.draws.guess[static_cast<size_t>(window * run.problem.tokens + i)];
    LogSumExp<double> bound = row.known.log_p(guess) > 0 ? LogSumExp<double>{guess, 0} : row.known;
    bound.low -= kBoundMargin;
    count = thin(run, i, list, count, bound);
    // Of probability 2e-28, see above: memory safety is not left to chance. No logit of the list is above
    // bound.high, so raising bound.low leaves nothing in the end; infinite and NaN bounds end here too.
    while (count + drawn.count > room) {
      bound.low += std::numbers::ln2;
      count = std::isfinite(bound.value()) ? thin(run, i, list, count, bound) : 0;
    }
  }
  for (int64_t k = 0; k < drawn.count; ++k) {
    list[count++] = {static_cast<int32_t>(drawn.first_column + drawn.columns[k]), drawn.logits[k]};
  }
}

void settle_list(const Runner& run, int64_t i, const LogSumExp<double>& lse) {
  const ThinnedArena& t = run.arena.thinned;
  SparseElement* list = t.row(t.draws.elements, i).data();
  int32_t& count = t.draws.count[static_cast<size_t>(i)];
  count = thin(run, i, list, count, {lse.high, lse.low - kBoundMargin});
  std::sort(list, list + count,
            [](const SparseElement& a, const SparseElement& b) { return a.index < b.index; });
}

Weighed weigh(const Runner& run, int64_t i, const SparseElement& element, const LogSumExp<double>& lse) {
  const Draws& d = run.arena.thinned.draws;
  const Problem& p = run.problem;
  const auto threshold = static_cast<float>(p.threshold);
  const int64_t window = draw_window_of(element.index / run.shape.vocab_block);
  const double guess = d.guess[static_cast<size_t>(window * p.tokens + i)];
  const auto probability = static_cast<float>(std::exp(lse.log_p(element.value)));
  const auto p_over_q = static_cast<float>(std::exp(lse.log_p(guess)));
  const uint32_t bits = draw_bits(static_cast<uint64_t>(d.seed[0]),
                                  static_cast<uint32_t>(run.arena.rows[static_cast<size_t>(i)]),
                                  static_cast<uint32_t>(p.vocab_start + element.index));
  if (p.in_group()) return {second_draw(probability, threshold, draw_uniform(bits)), probability};
  return {thinned_weight(probability, p_over_q, threshold, draw_uniform(bits)), probability};
}

}  // namespace logitless::cpu
