#include <algorithm>
#include <atomic>

#include "cpu/sparsified/sparsified.h"

namespace logitless::cpu {
namespace {

BlockStats block_stats(const Runner& run, int64_t partial, int64_t row) {
  const Arena& a = run.arena;
  const int64_t at = partial * run.schedule.token_chunk + row;
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

// Adds the strip's large logits to the rows' largest, after the strip's statistics. Workers with blocks of
// the same row add in any order, under the row's lock: the order does not change the largest of all.
void add_to_top(const Runner& run, const WorkerArena& w, const LogitStrip& strip, const float* max,
                int64_t block, int64_t row) {
  for (int64_t i = 0; i < strip.rows; ++i) {
    TopRow& top = run.arena.top_rows[static_cast<size_t>(row + i)];
    std::atomic_ref<float> least(top.least);
    const float known = least.load(std::memory_order_relaxed);
    if (max[i] < known) continue;
    const int64_t count = run.kernels.select_row(
        {strip.z + i * strip.stride, strip.padded_columns, known, w.columns.data(), w.element_logits.data()});
    const auto best = run.best_of_row(row + i);
    const int64_t first = run.problem.vocab_start + block * run.shape.vocab_block;
    const RowLock lock(top.lock);
    int64_t taken = top.count;
    for (int64_t j = 0; j < count && w.columns[static_cast<size_t>(j)] < strip.columns; ++j) {
      const auto at = static_cast<size_t>(j);
      taken = insert_top(best, taken, {w.element_logits[at], first + w.columns[at]});
    }
    top.count = static_cast<int32_t>(taken);
    if (taken == run.problem.top_k) least.store(best.back().z, std::memory_order_relaxed);
  }
}

// Adds the strip's columns to the rows' samples. Nearly all columns are left out by the upper bits of their
// groups and by their own.
void add_to_samples(const Runner& run, const WorkerArena& w, const LogitStrip& strip, int64_t block,
                    int64_t row) {
  const int64_t first = run.problem.vocab_start + block * run.shape.vocab_block;
  for (int64_t i = 0; i < strip.rows; ++i) {
    for (SampleRow& sample : run.samples_of_row(row + i)) {
      const float known = std::atomic_ref<float>(sample.best.key).load(std::memory_order_relaxed);
      const int64_t count = run.kernels.sample_row(
          {strip.z + i * strip.stride, strip.padded_columns, least_of_key(known), sample.of,
           static_cast<uint32_t>(first), w.columns.data(), w.element_logits.data()});
      SampledLogit<float> best;
      for (int64_t j = 0; j < count && w.columns[static_cast<size_t>(j)] < strip.columns; ++j) {
        const auto at = static_cast<size_t>(j);
        const float z = w.element_logits[at];
        const int64_t id = first + w.columns[at];
        // Masked rows have many logits of -inf, of which the first wins.
        if (best.id >= 0 && !may_win(z, least_of_key(best.key), sample.of, static_cast<uint32_t>(id)))
          continue;
        add_to_sample(best, sample.of, z, id);
      }
      if (best.id < 0) continue;
      const RowLock lock(sample.lock);
      SampledLogit<float>& to = sample.best;
      if (to.id >= 0 && !is_better(best.key, best.id, to.key, to.id)) continue;
      std::atomic_ref<float>(to.key).store(best.key, std::memory_order_relaxed);
      to.z = best.z;
      to.id = best.id;
    }
  }
}

// Begins the samples of the chunk's rows.
void begin_samples(const Runner& run, const Chunk& chunk) {
  for (int64_t i = 0; i < chunk.count; ++i) {
    const int64_t row = run.arena.rows[static_cast<size_t>(chunk.first + i)];
    const std::span<SampleRow> samples = run.samples_of_row(i);
    for (size_t s = 0; s < samples.size(); ++s) {
      samples[s] = {0, sample_key_of(run.problem, run.buffers, row, static_cast<int64_t>(s)), {}};
    }
  }
}

void block_task(const Runner& run, const Chunk& chunk, int worker_index, int64_t block, int64_t partial,
                const Range& task_rows) {
  WorkerArena w = run.worker(worker_index);
  prepare_block(run, w, block);
  const int64_t stride = run.shape.vocab_block;
  const bool keep = run.is_kept(block);
  std::byte* exp_logits = keep ? run.kept_exp_logits(block) : nullptr;
  int32_t targets[kMaxStripTargets];
  for (int64_t row = task_rows.start; row < task_rows.end; row += run.kernels.mr) {
    const int rows = static_cast<int>(std::min<int64_t>(run.kernels.mr, task_rows.end - row));
    strip_logits(run, w, row, rows);
    LogitStrip strip = logit_strip(run, w, block, row, rows, targets);
    strip.mask = column_mask(run.problem, run.buffers);
    strip.mask_row = run.arena.rows.data() + chunk.first + row;
    strip.mask_column = block * run.shape.vocab_block;
    const BlockStats stats = block_stats(run, partial, row);
    std::byte* row_exp_logits = keep ? exp_logits + row * stride * element_bytes(run.kernels) : nullptr;
    run.kernels.softmax_strip(strip, run.transform(w, row), stats, row_exp_logits, stride);
    if (keep) std::copy_n(stats.max, rows, run.block_offset(block) + row);
    if (run.problem.top_k > 0) add_to_top(run, w, strip, stats.max, block, row);
    if (run.problem.num_samples > 0) add_to_samples(run, w, strip, block, row);
    if (run.problem.is_sparsified()) draw_strip(run, chunk, w, strip, stats, block, row);
  }
}

// Sums the blocks' class weights; without any, each column counts one.
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
void merge_rows(const Runner& run, const Range& window, int64_t partial, const Range& rows) {
  for (int64_t row = rows.start; row < rows.end; ++row) {
    RowStats<double>& stats = run.arena.stats[static_cast<size_t>(row)];
    for (int64_t block = window.start; block < window.end; ++block) {
      const BlockStats in = block_stats(run, partial + block - window.start, row);
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

// Writes the target-logit statistic of the chunk's row i, which is the caller's row `row`.
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

void write_row_outputs(const Runner& run, const Chunk& chunk, const Range& rows) {
  if (run.problem.targets_per_row == 0 && run.problem.top_k == 0 && run.problem.num_samples == 0) return;
  for (int64_t i = rows.start; i < rows.end; ++i) {
    const int64_t row = run.arena.rows[static_cast<size_t>(chunk.first + i)];
    const LogSumExp<double> lse = log_sum_exp_parts(run.arena.stats[static_cast<size_t>(i)]);
    write_target_log_probs(run.problem, run.buffers, row, run.target_logits(i), lse);
    write_top<float>(run.problem, run.buffers, row, run.best_of_row(i), lse);
    for (int64_t s = 0; s < run.problem.num_samples; ++s) {
      write_sample(run.problem, run.buffers, row, s, run.samples_of_row(i)[static_cast<size_t>(s)].best, lse);
    }
  }
}

ForwardStage::ForwardStage(const Runner& run, const Chunk& chunk, TaskGroups& groups, TaskGroups::Id rows)
    : run_(run),
      chunk_(chunk),
      draws_(run.problem.is_sparsified()),
      windows_(draws_ ? draw_windows(run.shape.blocks)
                      : ceil_div(run.shape.blocks, run.schedule.forward_window)),
      alive_(forward_windows_alive(run.problem, run.schedule)) {
  std::fill_n(run.arena.stats.begin(), chunk.count, RowStats<double>{});
  std::fill_n(run.arena.target_logit.begin(), chunk.count * run.targets(), 0.0f);
  if (run.problem.top_k > 0) std::fill_n(run.arena.top_rows.begin(), chunk.count, TopRow{});
  begin_samples(run, chunk);
  if (chunk.is_first) sum_weights(run);
  const int64_t tasks = chunk.row_tasks();
  using Id = TaskGroups::Id;
  Id begun = rows;
  if (draws_) {
    begun = groups.add(tasks, {rows},
                       [this](int64_t task, int) { begin_draws(run_, chunk_, chunk_.rows(task)); });
  }
  Id merged = TaskGroups::kNone;
  Id merged_before = TaskGroups::kNone;  // the merge one window earlier
  for (int64_t w = 0; w < windows_; ++w) {
    if (draws_) {
      begun = groups.add(tasks, {begun, merged}, [this, w](int64_t task, int) {
        begin_draw_window(run_, chunk_, window(w).start, chunk_.rows(task));
      });
    }
    const Id partials_are_free = alive_ == 1 ? merged : merged_before;
    const Id computed =
        groups.add(block_tasks(w).count(), {begun, partials_are_free}, [this, w](int64_t task, int worker) {
          const BlockTasks::Task t = block_tasks(w)[task];
          block_task(run_, chunk_, worker, t.block, partial(w) + t.block - window(w).start, t.rows);
        });
    merged_before = merged;
    merged = groups.add(tasks, {computed, merged}, [this, w](int64_t task, int) {
      merge_rows(run_, window(w), partial(w), chunk_.rows(task));
    });
  }
  stats_ = groups.add(tasks, {merged, begun}, [this](int64_t task, int) { finish(chunk_.rows(task)); });
}

Range ForwardStage::window(int64_t w) const {
  const int64_t size = run_.schedule.forward_window;
  const int64_t start = draws_ ? draw_window_start(w) : w * size;
  return {start, std::min(run_.shape.blocks, draws_ ? draw_window_start(w + 1) : start + size)};
}

int64_t ForwardStage::partial(int64_t w) const {
  return w % alive_ * run_.schedule.forward_window;
}

// Draws wait for every window, so all windows are cut as the last one is.
BlockTasks ForwardStage::block_tasks(int64_t w) const {
  return {run_, window(w), chunk_.count, draws_ || w + 1 == windows_};
}

void ForwardStage::finish(const Range& rows) const {
  for (int64_t i = rows.start; i < rows.end; ++i) {
    finish_targets(run_, i, run_.arena.rows[static_cast<size_t>(chunk_.first + i)]);
  }
  if (run_.group == nullptr) write_row_outputs(run_, chunk_, rows);
  if (draws_ && !run_.joins_group()) settle_draws(run_, chunk_, rows);
}

}  // namespace logitless::cpu
