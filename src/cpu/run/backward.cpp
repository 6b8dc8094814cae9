#include <algorithm>

#include "cpu/run/runner.h"

namespace logitless::cpu {
namespace {

// Kept or recomputed exps of rows [row, row + rows) to gradients.
void finish_rows(const Runner& run, const LogitStrip& strip, const std::byte* exps, std::byte* dz,
                 const float* anchor, int64_t row) {
  const Arena& arena = run.arena;
  float factor[kMaxStripRows];
  for (int i = 0; i < strip.rows; ++i) {
    const auto at = static_cast<size_t>(row + i);
    const LogSumExp<double> lse{arena.lse_high[at], arena.lse_low[at]};
    factor[i] = static_cast<float>(lse.log_p(anchor[i]));
  }
  run.kernels.exp_row(factor, strip.rows, factor);
  for (int i = 0; i < strip.rows; ++i) factor[i] *= arena.a[static_cast<size_t>(row + i)];
  const float* c = run.problem.label_smoothing > 0 ? arena.c.data() + row : nullptr;
  run.kernels.finish_strip(strip, {exps, dz, factor, c, arena.target_gradient.data() + row * run.targets()});
}

// Gradients of one block's logits: from kept exps, or from the logits once more.
void gradient_task(const Runner& run, int worker_index, int64_t block, const Range& task_rows) {
  WorkerArena w = run.worker(worker_index);
  const bool kept = run.is_kept(block);
  const bool exps_first = keeps_exps(run.problem);
  // Kept blocks need no logits, but class weights come with the block's preparation.
  if (!kept || (run.problem.has.class_weight && run.problem.label_smoothing > 0))
    prepare_block(run, w, block);
  const int64_t stride = run.shape.vocab_block;
  const std::byte* exps = kept ? run.kept_exps(block) : run.block_gradients(block);
  std::byte* gradients = run.block_gradients(block);
  float* anchor = run.block_anchor(block);
  int32_t targets[kMaxStripTargets];
  float unused[kMaxStripRows], unused_logits[kMaxStripTargets];
  for (int64_t row = task_rows.start; row < task_rows.end; row += run.kernels.mr) {
    const int rows = static_cast<int>(std::min<int64_t>(run.kernels.mr, task_rows.end - row));
    const LogitStrip strip = logit_strip(run, w, block, row, rows, targets);
    const int64_t offset = row * stride * element_bytes(run.kernels);
    std::byte* dz = gradients + offset;
    if (!kept) strip_logits(run, w, row, rows);
    if (!exps_first) {
      const Arena& a = run.arena;
      const StripCoefficients k{.lse = a.lse_high.data() + row,
                                .lse_low = a.lse_low.data() + row,
                                .a = a.a.data() + row,
                                .b = a.b.data() + row,
                                .c = a.c.data() + row,
                                .g = a.g.data() + row * run.targets()};
      run.kernels.gradient_strip(strip, run.transform(w, row), k, dz, stride);
      continue;
    }
    // The same exps as the forward pass would have kept, so the result does not depend on the budget.
    if (!kept) {
      const BlockStats stats{.max = anchor + row, .sum_exp = unused, .target_logit = unused_logits};
      run.kernels.softmax_strip(strip, run.transform(w, row), stats, dz, stride);
    }
    finish_rows(run, strip, exps + offset, dz, anchor + row, row);
  }
}

// The classifier's rows of a block as panels with K along the vocabulary, for d_hidden.
void pack_panels(const Runner& run, int64_t block) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  k.pack_interleaved(run.classifier_from(block * s.vocab_block), s.block_columns(p.vocab, block), p.hidden,
                     s.vocab_block / k.pair, s.hidden_padded / k.nr, k.nr, run.block_panels(block));
}

void add_d_bias(const Runner& run, const Chunk& chunk, int64_t block) {
  const Shape& s = run.shape;
  float* sums = run.arena.d_bias.data() + block * s.vocab_block;
  for (int64_t token = 0; token < chunk.count; token += s.token_block) {
    const std::byte* dz = run.block_gradients(block) + token * s.vocab_block * element_bytes(run.kernels);
    run.kernels.add_column_sums(dz, s.vocab_block, std::min(s.token_block, chunk.count - token),
                                s.vocab_block, sums);
  }
}

}  // namespace

BackwardStage::BackwardStage(const Runner& run, const Chunk& chunk, const Range& blocks, TaskGroups& groups,
                             TaskGroups::Id coefficients, TaskGroups::Id panels)
    : run_(run),
      chunk_(chunk),
      blocks_(blocks),
      windows_(ceil_div(blocks.size(), run.schedule.backward_window)),
      hidden_rows_(rows_per_range(run, chunk.count, kTasksPerThread * run.schedule.threads)) {
  const int64_t alive = run.schedule.backward_windows_alive;
  Sums sums[kMostWindowsAlive];  // of the windows whose slots come next
  TaskGroups::Id made = TaskGroups::kNone;
  TaskGroups::Id hidden = TaskGroups::kNone;
  for (int64_t w = 0; w <= windows_; ++w) {
    if (w > 0) {
      Sums& before = sums[(w - 1) % alive];
      before = add_sums(groups, w - 1, made, panels, hidden);
      hidden = before.hidden;
    }
    if (w == windows_) break;
    const Sums& slot = sums[w % alive];
    made = groups.add(gradient_tasks(w).count(), {coefficients, slot.classifier, slot.hidden, slot.bias},
                      [this, w](int64_t task, int worker) {
                        const BlockTasks::Task t = gradient_tasks(w)[task];
                        gradient_task(run_, worker, t.block, t.rows);
                        if (t.rows.start == 0 && run_.problem.has.d_hidden) pack_panels(run_, t.block);
                      });
  }
  groups.add(run.problem.has.d_hidden ? chunk.row_tasks() : 0, {hidden},
             [this](int64_t task, int) { store_d_hidden(run_, chunk_, chunk_.rows(task)); });
}

Range BackwardStage::window(int64_t w) const {
  const int64_t size = run_.schedule.backward_window;
  const int64_t start = blocks_.start + w * size;
  return {start, std::min(blocks_.end, start + size)};
}

BlockTasks BackwardStage::gradient_tasks(int64_t w) const {
  return {run_, window(w), chunk_.count, true};
}

// The consumers of a window's gradients, long tasks first. The sums of d_hidden have the order of the blocks.
BackwardStage::Sums BackwardStage::add_sums(TaskGroups& groups, int64_t w, TaskGroups::Id made,
                                            TaskGroups::Id panels, TaskGroups::Id hidden_before) const {
  const Problem& p = run_.problem;
  const int64_t blocks = window(w).size();
  Sums sums;
  sums.classifier = groups.add(
      p.has.d_classifier ? blocks * classifier_splits(w) : 0, {made, panels},
      [this, w](int64_t task, int worker) {
        WorkerArena arena = run_.worker(worker);
        const int64_t splits = classifier_splits(w);
        const int64_t ranges = run_.shape.ranges / splits;
        const int64_t first = task % splits * ranges;
        add_d_classifier(run_, chunk_, arena, window(w).start + task / splits, {first, first + ranges});
      });
  sums.hidden = groups.add(p.has.d_hidden ? ceil_div(chunk_.count, hidden_rows_) : 0, {made, hidden_before},
                           [this, w](int64_t task, int) {
                             const int64_t row = task * hidden_rows_;
                             add_d_hidden(run_, window(w), {row, std::min(chunk_.count, row + hidden_rows_)});
                           });
  sums.bias = groups.add(p.has.d_bias ? blocks : 0, {made},
                         [this, w](int64_t task, int) { add_d_bias(run_, chunk_, window(w).start + task); });
  return sums;
}

// One thread computes all columns of a block of d_classifier when there are blocks for half of the threads:
// two that write the same rows at a time both fault on every fresh page, and each zeros one.
int64_t BackwardStage::classifier_splits(int64_t w) const {
  return 2 * window(w).size() < run_.schedule.threads ? run_.shape.ranges : 1;
}

}  // namespace logitless::cpu
