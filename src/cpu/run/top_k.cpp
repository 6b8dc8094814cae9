#include "cpu/run/top_k.h"

#include <algorithm>
#include <atomic>

#include "core/host_loss.h"
#include "cpu/run/row_lock.h"
#include "cpu/run/runner.h"

namespace logitless::cpu {
namespace {

std::span<TopLogit<float>> best_of_row(const Runner& run, int64_t row) {
  const auto k = static_cast<size_t>(run.problem.top_k);
  return run.arena.top.best.subspan(static_cast<size_t>(row) * k, k);
}

}  // namespace

void begin_top(const Runner& run, const Chunk& chunk) {
  if (run.problem.top_k > 0) std::fill_n(run.arena.top.rows.begin(), chunk.count, TopRow{});
}

void add_to_top(const Runner& run, const WorkerArena& w, const LogitStrip& strip, const float* max,
                int64_t block, int64_t row) {
  for (int64_t i = 0; i < strip.rows; ++i) {
    TopRow& top = run.arena.top.rows[static_cast<size_t>(row + i)];
    std::atomic_ref<float> least(top.least);
    const float known = least.load(std::memory_order_relaxed);
    if (max[i] < known) continue;
    const int64_t count = run.kernels.select_row(
        {strip.z + i * strip.stride, strip.padded_columns, known, w.top.columns.data(), w.top.logits.data()});
    const auto best = best_of_row(run, row + i);
    const int64_t first = run.problem.vocab_start + block * run.shape.vocab_block;
    const RowLock lock(top.lock);
    int64_t taken = top.count;
    for (int64_t j = 0; j < count && w.top.columns[static_cast<size_t>(j)] < strip.columns; ++j) {
      const auto at = static_cast<size_t>(j);
      taken = insert_top(best, taken, {w.top.logits[at], first + w.top.columns[at]});
    }
    top.count = static_cast<int32_t>(taken);
    if (taken == run.problem.top_k) least.store(best.back().z, std::memory_order_relaxed);
  }
}

void mark_missing_top(const Runner& run, const Chunk& chunk) {
  for (int64_t i = 0; i < chunk.count && run.problem.top_k > 0; ++i) {
    for (TopLogit<float>& none :
         best_of_row(run, i).subspan(static_cast<size_t>(run.arena.top.rows[static_cast<size_t>(i)].count))) {
      none = {0, -1};
    }
  }
}

void write_top_rows(const Runner& run, const Chunk& chunk, int64_t row, int64_t row_end) {
  if (run.problem.top_k == 0) return;
  for (int64_t i = row; i < row_end; ++i) {
    write_top<float>(run.problem, run.buffers, run.arena.rows[static_cast<size_t>(chunk.first + i)],
                     best_of_row(run, i), log_sum_exp_parts(run.arena.stats[static_cast<size_t>(i)]));
  }
}

}  // namespace logitless::cpu
