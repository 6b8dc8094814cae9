#include <algorithm>

#include "cpu/runner.h"

namespace headroom::cpu {
namespace {

struct Window {
  int64_t start = 0;
  int64_t end = 0;
  int64_t size() const { return end - start; }
};

// Kept or recomputed exps of rows [row, row + rows) to gradients, in place.
void finish_rows(const Runner& run, const WorkerArena& w, const LogitStrip& strip, std::byte* exps,
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
void gradient_task(const Runner& run, int worker_index, int64_t block, int64_t row, int64_t row_end) {
  WorkerArena w = run.worker(worker_index);
  const bool kept = run.is_kept(block);
  const bool exps_first = keeps_exps(run.problem);
  // Kept blocks need no logits, but class weights come with the block's preparation.
  if (!kept || (run.problem.has_class_weight && run.problem.label_smoothing > 0))
    prepare_block(run, w, block);
  const LogitTransform transform = run.transform(w);
  const int64_t stride = run.shape.vocab_block;
  std::byte* exps = run.block_exps(block);
  float* anchor = run.block_anchor(block);
  int32_t targets[kMaxStripRows];
  float unused[2][kMaxStripRows];
  for (; row < row_end; row += run.kernels.mr) {
    const int rows = static_cast<int>(std::min<int64_t>(run.kernels.mr, row_end - row));
    const LogitStrip strip = logit_strip(run, w, block, row, rows, targets);
    std::byte* row_exps = exps + row * stride * element_bytes(run.kernels);
    if (!kept) strip_logits(run, w, row, rows);
    if (!exps_first) {
      const Arena& a = run.arena;
      const StripCoefficients k{a.lse_high.data() + row, a.lse_low.data() + row, a.a.data() + row,
                                a.b.data() + row,        a.c.data() + row,       a.g.data() + row};
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
void pack_panels(const Runner& run, int64_t block) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  const int64_t units = s.vocab_block / k.pair;
  const auto* classifier = static_cast<const std::byte*>(run.buffers.classifier) +
                           block * s.vocab_block * run.buffers.classifier_stride *
                               static_cast<int64_t>(size_of(p.classifier_dtype));
  k.pack_interleaved({classifier, p.classifier_dtype, run.buffers.classifier_stride, p.compute_dtype},
                     s.block_columns(p.vocab, block), p.hidden, units, s.hidden_padded / k.nr, k.nr,
                     run.block_panels(block));
}

void add_d_bias(const Runner& run, const Chunk& chunk, int64_t block) {
  const Shape& s = run.shape;
  float* sums = run.arena.d_bias.data() + block * s.vocab_block;
  for (int64_t token = 0; token < chunk.count; token += s.token_block) {
    const std::byte* dz = run.block_exps(block) + token * s.vocab_block * element_bytes(run.kernels);
    run.kernels.add_column_sums(dz, s.vocab_block, std::min(s.token_block, chunk.count - token),
                                s.vocab_block, sums);
  }
}

// The three consumers of a window's gradients, long tasks first. One thread computes all columns of a block
// of d_classifier when there are blocks for half of the threads: two that write the same rows at a time both
// fault on every fresh page, and each zeros one.
class SumTasks {
 public:
  SumTasks(const Runner& run, const Chunk& chunk, const Window& window)
      : run_(run),
        chunk_(chunk),
        window_(window),
        range_(rows_per_range(run, chunk.count, kTasksPerThread * run.plan.threads)),
        splits_(2 * window.size() < run.plan.threads ? run.shape.ranges : 1),
        classifier_(run.problem.want_d_classifier ? window.size() * splits_ : 0),
        hidden_(run.problem.want_d_hidden && window.size() > 0 ? ceil_div(chunk.count, range_) : 0),
        bias_(run.problem.want_d_bias ? window.size() : 0) {}

  int64_t count() const { return classifier_ + hidden_ + bias_; }

  void operator()(int64_t task, int worker) const {
    if (task < classifier_) {
      WorkerArena w = run_.worker(worker);
      const int64_t ranges = run_.shape.ranges / splits_;
      const int64_t first = task % splits_ * ranges;
      add_d_classifier(run_, chunk_, w, window_.start + task / splits_, first, first + ranges);
    } else if (task < classifier_ + hidden_) {
      const int64_t row = (task - classifier_) * range_;
      add_d_hidden(run_, window_.start, window_.end, row, std::min(chunk_.count, row + range_));
    } else {
      add_d_bias(run_, chunk_, window_.start + task - classifier_ - hidden_);
    }
  }

 private:
  const Runner& run_;
  const Chunk& chunk_;
  const Window window_;
  const int64_t range_;   // rows in a task of d_hidden
  const int64_t splits_;  // tasks for d_classifier of a block
  const int64_t classifier_, hidden_, bias_;
};

}  // namespace

// A pipeline over windows of blocks: the sums of one window beside the gradients of the next, which are many
// small tasks and so fill the end. One barrier a window.
void backward_chunk(const Runner& run, const Chunk& chunk) {
  const int64_t blocks = run.shape.blocks;
  const int64_t size = backward_window(run.plan);
  for (Window window{0, 0}; window.start < blocks;) {
    const Window next{window.end, std::min(blocks, window.end + size)};
    const SumTasks sums(run, chunk, window);
    const BlockTasks gradients(run, next.start, next.end, chunk.count);
    run.parallel_for(sums.count() + gradients.count(), [&](int64_t task, int worker) {
      if (task < sums.count()) return sums(task, worker);
      const BlockTasks::Task t = gradients[task - sums.count()];
      gradient_task(run, worker, t.block, t.row, t.row_end);
      if (t.row == 0 && run.problem.want_d_hidden) pack_panels(run, t.block);
    });
    window = next;
  }
  if (run.problem.want_d_hidden) store_d_hidden(run, chunk);
}

void backward_blocks(const Runner& run, const Chunk& chunk, int64_t first, int64_t last) {
  const BlockTasks gradients(run, first, last, chunk.count);
  run.parallel_for(gradients.count(), [&](int64_t task, int worker) {
    const BlockTasks::Task t = gradients[task];
    gradient_task(run, worker, t.block, t.row, t.row_end);
  });
  const SumTasks sums(run, chunk, {first, last});
  run.parallel_for(sums.count(), [&](int64_t task, int worker) { sums(task, worker); });
}

}  // namespace headroom::cpu
