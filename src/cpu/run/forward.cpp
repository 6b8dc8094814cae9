#include <algorithm>
#include <cmath>

#include "cpu/run/stages.h"
#include "cpu/thinned/draw.h"
#include "cpu/thinned/windows.h"

namespace logitless::cpu {
namespace {

BlockStats block_stats(const Runner& run, int64_t slot, int64_t row) {
  const Arena& a = run.arena;
  const int64_t at = slot * run.schedule.token_chunk + row;
  const auto pick = [at](auto span) { return span.empty() ? nullptr : span.data() + at; };
  BlockStats stats;
  stats.max = pick(a.block_max);
  stats.sum_exp = pick(a.block_sum);
  stats.target_logit = a.target_logit.data() + row * run.targets();
#define LOGITLESS_PICK(name, part, ...) stats.part = pick(a.block_##part);
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_PICK)
#undef LOGITLESS_PICK
  stats.argmax = pick(a.block_argmax);
  return stats;
}

void block_task(const Runner& run, const Chunk& chunk, int worker_index, int64_t block, int64_t slot,
                int64_t row, int64_t row_end) {
  WorkerArena w = run.worker(worker_index);
  prepare_block(run, w, block);
  const int64_t stride = run.shape.vocab_block;
  const bool keep = run.is_kept(block);
  std::byte* exps = keep ? run.kept_exps(block) : nullptr;
  int32_t targets[kMaxStripTargets];
  for (; row < row_end; row += run.kernels.mr) {
    const int rows = static_cast<int>(std::min<int64_t>(run.kernels.mr, row_end - row));
    strip_logits(run, w, row, rows);
    const LogitStrip strip = logit_strip(run, w, block, row, rows, targets);
    const BlockStats stats = block_stats(run, slot, row);
    std::byte* row_exps = keep ? exps + row * stride * element_bytes(run.kernels) : nullptr;
    run.kernels.softmax_strip(strip, run.transform(w, row), stats, row_exps, stride);
    if (keep) std::copy_n(stats.max, rows, run.block_anchor(block) + row);
    if (run.problem.top_k > 0) add_to_top(run, w, strip, stats.max, block, row);
    if (run.problem.is_thinned()) draw_strip(run, chunk, w, strip, stats, block, row);
  }
}

// Sums of the blocks' class weights, one for each column without.
void sum_weights(const Runner& run) {
  const Problem& p = run.problem;
  for (int64_t block = 0; block < static_cast<int64_t>(run.arena.block_weight.size()); ++block) {
    const int64_t first = p.vocab_start + block * run.shape.vocab_block;
    const int64_t columns = run.shape.block_columns(p.vocab, block);
    double sum = p.has.class_weight ? 0 : static_cast<double>(columns);
    for (int64_t j = 0; j < columns && p.has.class_weight; ++j) {
      sum += static_cast<const float*>(run.buffers.class_weight)[first + j];
    }
    run.arena.block_weight[static_cast<size_t>(block)] = sum;
  }
}

// Merges the window's blocks into the rows' statistics, in the order of the vocabulary.
void merge_rows(const Runner& run, const Window& window, int64_t slot, int64_t row, int64_t row_end) {
  for (; row < row_end; ++row) {
    RowStats<double>& stats = run.arena.stats[static_cast<size_t>(row)];
    for (int64_t block = window.start; block < window.end; ++block) {
      const BlockStats in = block_stats(run, slot + block - window.start, row);
      RowStats<double> s;
      s.max = *in.max;
      s.sum_exp = *in.sum_exp;
#define LOGITLESS_SUM(name, part, ...) \
  if (in.part != nullptr) s.part = *in.part;
      LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
      if (in.weighted != nullptr) s.weight = run.arena.block_weight[static_cast<size_t>(block)];
      if (in.argmax != nullptr) {
        s.argmax = run.problem.vocab_start + block * run.shape.vocab_block + *in.argmax;
      }
      stats = merge(stats, s);
    }
  }
}

// From the logits of the targets of the chunk's row i, the caller's row `row`.
void finish_targets(const Runner& run, int64_t i, int64_t row) {
  RowStats<double>& stats = run.arena.stats[static_cast<size_t>(i)];
  const std::span<const float> logits = run.target_logits(i);
  if (run.problem.targets_per_row == 0) {
    stats.target_logit = logits[0];
    return;
  }
  stats.target_logit = target_logit_of(run.problem, run.buffers, row, logits);
}

}  // namespace

void tell_rows(const Runner& run, const Chunk& chunk, int64_t row, int64_t row_end) {
  for (int64_t i = row; i < row_end && run.problem.targets_per_row > 0; ++i) {
    write_target_log_probs(run.problem, run.buffers, run.arena.rows[static_cast<size_t>(chunk.first + i)],
                           run.target_logits(i), log_sum_exp_parts(run.arena.stats[static_cast<size_t>(i)]));
  }
  write_top_rows(run, chunk, row, row_end);
}

ForwardStage::ForwardStage(const Runner& run, const Chunk& chunk, TaskGroups& groups, TaskGroups::Id rows)
    : run_(run),
      chunk_(chunk),
      draws_(run.problem.is_thinned()),
      windows_(draws_ ? draw_windows(run.shape.blocks)
                      : ceil_div(run.shape.blocks, run.schedule.forward_window)),
      alive_(forward_windows_alive(run.problem, run.schedule)) {
  std::fill_n(run.arena.stats.begin(), chunk.count, RowStats<double>{});
  std::fill_n(run.arena.target_logit.begin(), chunk.count * run.targets(), 0.0f);
  begin_top(run, chunk);
  if (chunk.is_first) sum_weights(run);
  const int64_t tasks = row_tasks(chunk.count);
  using Id = TaskGroups::Id;
  Id begun = rows;
  if (draws_) begun = groups.add(tasks, {rows}, TaskBody::of<&ForwardStage::begin_draws_of_rows>(*this));
  Id merged = TaskGroups::kNone;
  Id merged_before = TaskGroups::kNone;  // one window earlier
  for (int64_t w = 0; w < windows_; ++w) {
    if (draws_)
      begun = groups.add(tasks, {begun, merged}, TaskBody::of<&ForwardStage::begin_window>(*this), w);
    const Id slots_are_free = alive_ == 1 ? merged : merged_before;
    const Id computed = groups.add(block_tasks(w).count(), {begun, slots_are_free},
                                   TaskBody::of<&ForwardStage::blocks>(*this), w);
    merged_before = merged;
    merged = groups.add(tasks, {computed, merged}, TaskBody::of<&ForwardStage::merge>(*this), w);
  }
  stats_ = groups.add(tasks, {merged, begun}, TaskBody::of<&ForwardStage::finish>(*this));
}

Window ForwardStage::window(int64_t w) const {
  const int64_t size = run_.schedule.forward_window;
  const int64_t start = draws_ ? draw_window_start(w) : w * size;
  return {start, std::min(run_.shape.blocks, draws_ ? draw_window_start(w + 1) : start + size)};
}

int64_t ForwardStage::slot(int64_t w) const {
  return w % alive_ * run_.schedule.forward_window;
}

// Draws wait for every window.
BlockTasks ForwardStage::block_tasks(int64_t w) const {
  return {run_, window(w), chunk_.count, draws_ || w + 1 == windows_};
}

void ForwardStage::begin_draws_of_rows(int64_t, int64_t task, int) const {
  begin_draws(run_, chunk_, task * kTaskRows, std::min(chunk_.count, (task + 1) * kTaskRows));
}

void ForwardStage::begin_window(int64_t w, int64_t task, int) const {
  begin_draw_window(run_, chunk_, window(w).start, task * kTaskRows,
                    std::min(chunk_.count, (task + 1) * kTaskRows));
}

void ForwardStage::blocks(int64_t w, int64_t task, int worker) const {
  const BlockTasks::Task t = block_tasks(w)[task];
  block_task(run_, chunk_, worker, t.block, slot(w) + t.block - window(w).start, t.row, t.row_end);
}

void ForwardStage::merge(int64_t w, int64_t task, int) const {
  merge_rows(run_, window(w), slot(w), task * kTaskRows, std::min(chunk_.count, (task + 1) * kTaskRows));
}

void ForwardStage::finish(int64_t, int64_t task, int) const {
  const int64_t row = task * kTaskRows;
  const int64_t row_end = std::min(chunk_.count, row + kTaskRows);
  for (int64_t i = row; i < row_end; ++i) {
    finish_targets(run_, i, run_.arena.rows[static_cast<size_t>(chunk_.first + i)]);
  }
  if (run_.group == nullptr) tell_rows(run_, chunk_, row, row_end);
  if (draws_ && !run_.joins_group()) settle_draws(run_, chunk_, row, row_end);
}

}  // namespace logitless::cpu
