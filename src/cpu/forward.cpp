#include <algorithm>
#include <cmath>

#include "cpu/runner.h"
#include "cpu/thinned/draw.h"
#include "cpu/thinned/windows.h"

namespace headroom::cpu {
namespace {

BlockStats block_stats(const Runner& run, int64_t slot, int64_t row) {
  const Arena& a = run.arena;
  const int64_t at = slot * run.plan.token_chunk + row;
  const auto pick = [at](auto span) { return span.empty() ? nullptr : span.data() + at; };
  return {pick(a.block_max),    pick(a.block_sum),      a.target_logit.data() + row,
          pick(a.block_offset), pick(a.block_weighted), pick(a.block_argmax)};
}

void block_task(const Runner& run, const Chunk& chunk, int worker_index, int64_t block, int64_t slot,
                int64_t row, int64_t row_end) {
  WorkerArena w = run.worker(worker_index);
  prepare_block(run, w, block);
  const LogitTransform transform = run.transform(w);
  const int64_t stride = run.shape.vocab_block;
  const bool keep = run.is_kept(block);
  std::byte* exps = keep ? run.block_exps(block) : nullptr;
  int32_t targets[kMaxStripRows];
  for (; row < row_end; row += run.kernels.mr) {
    const int rows = static_cast<int>(std::min<int64_t>(run.kernels.mr, row_end - row));
    strip_logits(run, w, row, rows);
    const LogitStrip strip = logit_strip(run, w, block, row, rows, targets);
    const BlockStats stats = block_stats(run, slot, row);
    std::byte* row_exps = keep ? exps + row * stride * element_bytes(run.kernels) : nullptr;
    run.kernels.softmax_strip(strip, transform, stats, row_exps, stride);
    if (keep) std::copy_n(stats.max, rows, run.block_anchor(block) + row);
    if (run.problem.is_thinned()) draw_strip(run, chunk, w, strip, stats, block, row);
  }
}

// Sums of the blocks' class weights, one for each column without.
void sum_weights(const Runner& run) {
  const Problem& p = run.problem;
  for (int64_t block = 0; block < static_cast<int64_t>(run.arena.block_weight.size()); ++block) {
    const int64_t first = p.vocab_start + block * run.shape.vocab_block;
    const int64_t columns = run.shape.block_columns(p.vocab, block);
    double sum = p.has_class_weight ? 0 : static_cast<double>(columns);
    for (int64_t j = 0; j < columns && p.has_class_weight; ++j) {
      sum += static_cast<const float*>(run.buffers.class_weight)[first + j];
    }
    run.arena.block_weight[static_cast<size_t>(block)] = sum;
  }
}

// Merges the window's blocks into the rows' statistics, in the order of the vocabulary.
void merge_rows(const Runner& run, int64_t window_start, int64_t window_end, int64_t row, int64_t row_end) {
  for (; row < row_end; ++row) {
    RowStats<double>& stats = run.arena.stats[static_cast<size_t>(row)];
    for (int64_t block = window_start; block < window_end; ++block) {
      const BlockStats in = block_stats(run, block - window_start, row);
      RowStats<double> s;
      s.max = *in.max;
      s.sum_exp = *in.sum_exp;
      // exp(z - max) z = exp(z - max) (z - max) + exp(z - max) max; a masked block adds nothing
      if (in.sum_exp_offset != nullptr && s.sum_exp != 0)
        s.sum_exp_logit = *in.sum_exp_offset + s.max * s.sum_exp;
      if (in.weighted_offset_sum != nullptr) {
        const double anchor = s.max == -INFINITY ? 0 : s.max;
        s.weighted_logit_sum =
            *in.weighted_offset_sum + anchor * run.arena.block_weight[static_cast<size_t>(block)];
      }
      if (in.argmax != nullptr) {
        s.argmax = run.problem.vocab_start + block * run.shape.vocab_block + *in.argmax;
      }
      stats = merge(stats, s);
    }
  }
}

}  // namespace

void forward_chunk(const Runner& run, const Chunk& chunk) {
  std::fill_n(run.arena.stats.begin(), chunk.count, RowStats<double>{});
  std::fill_n(run.arena.target_logit.begin(), chunk.count, 0.0f);
  if (chunk.is_first) sum_weights(run);
  const bool draws = run.problem.is_thinned();
  const int64_t blocks = run.shape.blocks;
  int64_t end = 0;
  for (int64_t start = 0; start < blocks; start = end) {
    end = draws ? draw_window_end(start, blocks) : std::min(blocks, start + forward_window(run.plan));
    if (draws) begin_draw_window(run, chunk, start);
    const BlockTasks tasks(run, start, end, chunk.count);
    run.parallel_for(tasks.count(), [&](int64_t task, int worker) {
      const BlockTasks::Task t = tasks[task];
      block_task(run, chunk, worker, t.block, t.block - start, t.row, t.row_end);
    });
    constexpr int64_t kMergeRows = 64;
    run.parallel_for(ceil_div(chunk.count, kMergeRows), [&](int64_t task, int) {
      merge_rows(run, start, end, task * kMergeRows, std::min(chunk.count, (task + 1) * kMergeRows));
    });
  }
  for (int64_t i = 0; i < chunk.count; ++i) {
    run.arena.stats[static_cast<size_t>(i)].target_logit = run.arena.target_logit[static_cast<size_t>(i)];
  }
}

}  // namespace headroom::cpu
