#include <algorithm>
#include <cmath>
#include <utility>

#include "core/sparsification.h"
#include "core/targets.h"
#include "cpu/sparsified/sparsified.h"

namespace logitless::cpu {
namespace {

// A row of the chunk behind the screen.
struct ScreenedRow {
  const Runner& run;
  int64_t at;      // among the rows that are not ignored
  int64_t source;  // the caller's row

  float logit(int64_t column) const { return static_cast<float>(logit_of(run, source, column)); }
};

// Returns the estimated standard error of the row's lse.
double settle_row(const ScreenedRow& row, int64_t target, RowStats<double>* stats) {
  const Runner& run = row.run;
  const SparsifiedArena& t = run.arena.sparsified;
  const auto list = t.row(t.draws.elements, row.at);
  const auto probability =
      t.draws.probability.subspan(static_cast<size_t>(row.at * t.capacity), static_cast<size_t>(t.capacity));
  const int32_t count = std::exchange(t.draws.count[static_cast<size_t>(row.at)], 0);
  const LogSumExp<double> lse8 = log_sum_exp_parts(*stats);
  const double target8 = std::exchange(stats->target_logit, row.logit(target));
  if (!std::isfinite(lse8.value())) return NAN;  // nothing has a weight, as without a screen
  // Threads have added elements in any order.
  std::sort(list.begin(), list.begin() + count,
            [](const SparseElement& a, const SparseElement& b) { return a.index < b.index; });
  ScreenedSum<double> sum;
  sum.add(1, lse8.log_p(stats->target_logit), lse8.log_p(target8));
  size_t kept = 0;
  for (int32_t k = 0; k < count; ++k) {
    const SparseElement element = list[static_cast<size_t>(k)];
    if (element.index == target) continue;
    const ElementWeight w = reweight(run, row.at, element, lse8);
    if (w.weight == 0) continue;
    const float z = row.logit(element.index);
    const float of_kept = w.probability / w.weight;
    sum.add(of_kept, lse8.log_p(z), lse8.log_p(element.value));
    list[kept] = {element.index, z};
    probability[kept++] = of_kept;
  }
  t.draws.count[static_cast<size_t>(row.at)] = static_cast<int32_t>(kept);
  stats->sum_exp *= std::exp(sum.log_sum());
  return std::sqrt(sum.relative_variance());
}

}  // namespace

void settle_screen(const Runner& run, const Chunk& chunk, const Range& rows) {
  for (int64_t i = rows.start; i < rows.end; ++i) {
    const ScreenedRow row{run, chunk.first + i, run.arena.rows[static_cast<size_t>(chunk.first + i)]};
    const double error =
        settle_row(row, run.arena.target[static_cast<size_t>(i)], &run.arena.stats[static_cast<size_t>(i)]);
    void* out = run.buffers.loss_error;
    if (out != nullptr) store_from_double(out, run.problem.stats_dtype(), row.source, error);
  }
}

}  // namespace logitless::cpu
