#include <algorithm>

#include "cpu/runner.h"

namespace headroom::cpu {
namespace {

struct Window {
  int64_t start = 0;
  int64_t end = 0;
};

// Kept or recomputed exps of rows [row, row + rows) to gradients, in place.
void finish_rows(const Runner& run, const WorkerArena& w, const LogitStrip& strip, std::byte* exps,
                 const float* anchor, int64_t row) {
  const Arena& arena = run.arena;
  float factor[kMaxStripRows];
  for (int i = 0; i < strip.rows; ++i)
    factor[i] = static_cast<float>(anchor[i] - arena.lse[static_cast<size_t>(row + i)]);
  run.kernels.exp_row(factor, strip.rows, factor);
  for (int i = 0; i < strip.rows; ++i) factor[i] *= arena.a[static_cast<size_t>(row + i)];
  FinishStrip f;
  f.exps = exps;
  f.stride = run.shape.vocab_block;
  f.rows = strip.rows;
  f.columns = strip.columns;
  f.factor = factor;
  f.c = run.problem.label_smoothing > 0 ? arena.c.data() + row : nullptr;
  f.class_weight = run.problem.has_class_weight ? w.class_weight.data() : nullptr;
  f.target = strip.target;
  f.target_value = arena.target_gradient.data() + row;
  run.kernels.finish_strip(f);
}

// Gradients of one block's logits for rows [row, row_end): from kept exps, or from the logits once more.
void gradient_task(const Runner& run, int worker_index, int64_t block, const Window& window, int64_t row,
                   int64_t row_end) {
  WorkerArena w = run.worker(worker_index);
  const bool kept = run.is_kept(block);
  const bool exps_first = keeps_exps(run.problem);
  // Kept blocks need no logits, but class weights come with the block's preparation.
  if (!kept || (run.problem.has_class_weight && run.problem.label_smoothing > 0))
    prepare_block(run, w, block);
  const LogitTransform transform = run.transform(w);
  const int64_t stride = run.shape.vocab_block;
  std::byte* exps = run.block_exps(block, window.start);
  float* anchor = run.block_anchor(block, window.start);
  int32_t targets[kMaxStripRows];
  float unused[2][kMaxStripRows];
  for (; row < row_end; row += run.kernels.mr) {
    const int rows = static_cast<int>(std::min<int64_t>(run.kernels.mr, row_end - row));
    const LogitStrip strip = logit_strip(run, w, block, row, rows, targets);
    std::byte* row_exps = exps + row * stride * element_bytes(run.kernels);
    if (!kept) strip_logits(run, w, row, rows);
    if (!exps_first) {
      const Arena& a = run.arena;
      const StripCoefficients k{a.lse32.data() + row, a.a.data() + row, a.b.data() + row, a.c.data() + row,
                                a.g.data() + row};
      run.kernels.gradient_strip(strip, transform, k, row_exps, stride);
      continue;
    }
    // The same exps as the forward pass would have kept, so the result does not depend on the budget.
    if (!kept) {
      BlockStats stats;
      stats.max = anchor + row;
      stats.sum_exp = unused[0];
      stats.target_logit = unused[1];
      run.kernels.softmax_strip(strip, transform, stats, row_exps, stride);
    }
    finish_rows(run, w, strip, row_exps, anchor + row, row);
  }
}

// The classifier's rows of a block as panels with K along the vocabulary, for d_hidden.
void pack_window_panels(const Runner& run, int64_t block, const Window& window) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  const int64_t units = s.vocab_block / k.pair;
  const auto* classifier = static_cast<const std::byte*>(run.buffers.classifier) +
                           block * s.vocab_block * run.buffers.classifier_stride *
                               static_cast<int64_t>(size_of(p.classifier_dtype));
  k.pack_interleaved({classifier, p.classifier_dtype, run.buffers.classifier_stride},
                     s.block_columns(p.vocab, block), p.hidden, units, s.hidden_padded / k.nr, k.nr,
                     run.arena.window_panels.data() + (block - window.start) * units * s.hidden_padded);
}

void add_d_bias(const Runner& run, const Chunk& chunk, int64_t block, const Window& window) {
  const Shape& s = run.shape;
  run.kernels.add_column_sums(run.block_exps(block, window.start), s.vocab_block, chunk.count, s.vocab_block,
                              run.arena.d_bias.data() + block * s.vocab_block);
}

// Gradients of the window's logits, and the classifier's panels for what follows.
void window_gradients(const Runner& run, const Chunk& chunk, const Window& window) {
  const int64_t blocks = window.end - window.start;
  const int64_t range =
      rows_per_range(run, chunk.count, ceil_div(kTasksPerThread * run.plan.threads, blocks));
  const int64_t ranges = ceil_div(chunk.count, range);
  run.parallel_for(blocks * ranges, [&](int64_t task, int worker) {
    const int64_t block = window.start + task / ranges;
    const int64_t row = task % ranges * range;
    gradient_task(run, worker, block, window, row, std::min(chunk.count, row + range));
    if (row == 0 && run.problem.want_d_hidden) pack_window_panels(run, block, window);
  });
}

// The three consumers of a window's gradients, side by side: long tasks first, so that the short ones even
// out the end.
void window_sums(const Runner& run, const Chunk& chunk, const Window& window) {
  const Problem& p = run.problem;
  const int64_t blocks = window.end - window.start;
  const int64_t classifier_tasks = p.want_d_classifier ? blocks * run.shape.ranges : 0;
  const int64_t range = rows_per_range(run, chunk.count, kTasksPerThread * run.plan.threads);
  const int64_t hidden_tasks = p.want_d_hidden ? ceil_div(chunk.count, range) : 0;
  const int64_t bias_tasks = p.want_d_bias ? blocks : 0;
  run.parallel_for(classifier_tasks + hidden_tasks + bias_tasks, [&](int64_t task, int worker) {
    if (task < classifier_tasks) {
      WorkerArena w = run.worker(worker);
      add_d_classifier(run, chunk, w, window.start + task / run.shape.ranges, window.start,
                       task % run.shape.ranges);
      return;
    }
    task -= classifier_tasks;
    if (task < hidden_tasks) {
      add_d_hidden(run, window.start, window.end, task * range, std::min(chunk.count, (task + 1) * range));
      return;
    }
    add_d_bias(run, chunk, window.start + task - hidden_tasks, window);
  });
}

}  // namespace

void backward_chunk(const Runner& run, const Chunk& chunk) {
  const int64_t size = backward_window(run.plan);
  for (int64_t start = 0; start < run.shape.blocks; start += size) {
    const Window window{start, std::min(run.shape.blocks, start + size)};
    window_gradients(run, chunk, window);
    window_sums(run, chunk, window);
  }
  if (run.problem.want_d_hidden) store_d_hidden(run, chunk);
}

}  // namespace headroom::cpu
