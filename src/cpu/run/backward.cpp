#include <algorithm>
#include <cstring>

#include "cpu/run/runner.h"

namespace logitless::cpu {
namespace {

// Columns of a gradient that are computed together. Their panels, 256 units deep, stay in the second level
// cache while all strips pass by.
constexpr int64_t kPartColumns = 256;

// Returns the sum of d_weight over chunks for row j of a block; null where one chunk is all.
float* running_row(const Runner& run, int64_t block, int64_t j, int64_t column) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  if (p.dtype.d_weight == DType::kF32) {
    return reinterpret_cast<float*>(run.d_weight_row(block * s.vocab_block + j, column));
  }
  if (run.arena.d_weight.empty()) return nullptr;
  const int64_t partial = run.schedule.sweeps_vocabulary ? block % run.schedule.backward_window : block;
  return run.arena.d_weight.data() + (partial * s.vocab_block + j) * s.hidden_padded + column;
}

// d_weight[block, range] += dz[:, block]^T hidden[:, range], over the chunk's tokens.
void add_range(const Runner& run, const Chunk& chunk, WorkerArena& w, int64_t block, int64_t range,
               bool dz_is_packed) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  const int64_t vocab = s.block_columns(p.vocab, block);
  const int64_t column = range * s.range;
  const int64_t padded = std::min(s.range, s.hidden_padded - column);
  const int64_t columns = std::min(padded, p.hidden - column);
  float* sums = w.d_weight.data();
  const bool add_to_running = !chunk.is_first || p.accumulate.d_weight;
  if (add_to_running) {
    for (int64_t j = 0; j < vocab; ++j) {
      std::copy_n(running_row(run, block, j, column), columns, sums + j * padded);
      std::fill_n(sums + j * padded + columns, padded - columns, 0.0f);
    }
  }
  const auto* dz = run.block_gradients(block);
  const int64_t dz_row_bytes = s.vocab_block * element_bytes(k);
  for (int64_t token = 0; token < chunk.count; token += s.token_block) {
    const int64_t tokens = std::min(s.token_block, chunk.count - token);
    const int64_t units = ceil_div(tokens, k.pair);
    const std::byte* dz_rows = dz + token * dz_row_bytes;
    GemmStrip g;
    if (k.pair == 1) {
      g.a = reinterpret_cast<const uint32_t*>(dz_rows);
    } else {
      if (!dz_is_packed) {
        k.pack_interleaved({dz_rows, element_dtype(k), s.vocab_block}, tokens, s.vocab_block, units, 1,
                           s.vocab_block, w.dz_pairs.data());
      }
      g.a = w.dz_pairs.data();
    }
    const uint32_t* a = g.a;
    g.a_stride = s.vocab_block;
    g.k = units;
    const uint32_t* panels =
        run.arena.hidden_panels.data() + token / k.pair * s.hidden_padded + column * units;
    g.b_panel_stride = units * k.nr;
    g.c_stride = padded;
    g.add = token > 0 || add_to_running;
    for (int64_t part = 0; part < padded; part += kPartColumns) {
      g.b = panels + part * units;
      g.panels = std::min(kPartColumns, padded - part) / k.nr;
      for (int64_t j = 0; j < vocab; j += k.mr) {
        g.a = a + j;
        g.c = sums + j * padded + part;
        g.rows = static_cast<int>(std::min<int64_t>(k.mr, vocab - j));
        k.gemm_columns(g);
      }
    }
  }
  for (int64_t j = 0; j < vocab; ++j) {
    const float* from = sums + j * padded;
    if (!chunk.is_last || p.dtype.d_weight == DType::kF32) {
      std::copy_n(from, columns, running_row(run, block, j, column));
    } else {
      k.store_row(from, columns, 1, false, p.dtype.d_weight,
                  run.d_weight_row(block * s.vocab_block + j, column));
    }
  }
}

void add_d_weight(const Runner& run, const Chunk& chunk, WorkerArena& w, int64_t block, const Range& ranges) {
  const bool one_token_block = chunk.count <= run.shape.token_block;
  for (int64_t range = ranges.start; range < ranges.end; ++range) {
    add_range(run, chunk, w, block, range, one_token_block && range > ranges.start);
  }
}

// d_hidden[rows, :] += dz[rows, blocks] weight[blocks, :], one partial sum for every block.
void add_d_hidden(const Runner& run, const Range& blocks, const Range& rows) {
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  const int64_t units = s.vocab_block / k.pair;
  GemmStrip g;
  g.a_stride = units;
  g.k = units;
  g.b_panel_stride = units * k.nr;
  g.c_stride = s.gradient_stride;
  for (int64_t block = blocks.start; block < blocks.end; ++block) {
    g.add = block > 0;
    const auto* dz = reinterpret_cast<const uint32_t*>(run.block_gradients(block));
    for (int64_t part = 0; part < s.hidden_padded; part += kPartColumns) {
      g.b = run.block_panels(block) + part * units;
      g.panels = std::min(kPartColumns, s.hidden_padded - part) / k.nr;
      for (int64_t i = rows.start; i < rows.end; i += k.mr) {
        g.a = dz + i * units;
        g.rows = static_cast<int>(std::min<int64_t>(k.mr, rows.end - i));
        g.c = run.arena.d_hidden.data() + i * s.gradient_stride + part;
        k.gemm_rows(g);
      }
    }
  }
}

void store_d_hidden(const Runner& run, const Chunk& chunk, const Range& rows) {
  const Problem& p = run.problem;
  for (int64_t row = rows.start; row < rows.end; ++row) {
    const int64_t to = run.arena.rows[static_cast<size_t>(chunk.first + row)];
    run.kernels.store_row(run.arena.d_hidden.data() + row * run.shape.gradient_stride, p.hidden, 1,
                          p.accumulate.d_hidden, p.dtype.d_hidden, run.d_hidden_row(to));
  }
}

// Turns kept or recomputed exp logits of rows [row, row + rows) into gradients.
void finish_rows(const Runner& run, const LogitStrip& strip, const std::byte* exp_logits, std::byte* dz,
                 const float* logit_offset, int64_t row) {
  const Arena& arena = run.arena;
  float factor[kMaxStripRows];
  for (int i = 0; i < strip.rows; ++i) {
    const auto at = static_cast<size_t>(row + i);
    const LogSumExp<double> lse{arena.lse_high[at], arena.lse_residual[at]};
    factor[i] = static_cast<float>(lse.log_p(logit_offset[i]));
  }
  run.kernels.exp_row(factor, strip.rows, factor);
  for (int i = 0; i < strip.rows; ++i) factor[i] *= arena.a[static_cast<size_t>(row + i)];
  const float* c = run.problem.label_smoothing > 0 ? arena.c.data() + row : nullptr;
  run.kernels.finish_strip(strip,
                           {exp_logits, dz, factor, c, arena.target_gradient.data() + row * run.targets()});
}

// Computes the gradients of one block's logits, from kept exp logits or from logits computed again.
void gradient_task(const Runner& run, int worker_index, int64_t block, const Range& task_rows) {
  WorkerArena w = run.worker(worker_index);
  const bool kept = run.is_kept(block);
  const bool exp_logits_first = keeps_exp_logits(run.problem);
  // Kept blocks need no logits, but class weights come with the block's preparation.
  if (!kept || (run.problem.has.class_weight && run.problem.label_smoothing > 0))
    prepare_block(run, w, block);
  const int64_t stride = run.shape.vocab_block;
  const std::byte* exp_logits = kept ? run.kept_exp_logits(block) : run.block_gradients(block);
  std::byte* gradients = run.block_gradients(block);
  float* logit_offset = run.block_offset(block);
  int32_t targets[kMaxStripTargets];
  float unused[kMaxStripRows], unused_logits[kMaxStripTargets];
  for (int64_t row = task_rows.start; row < task_rows.end; row += run.kernels.mr) {
    const int rows = static_cast<int>(std::min<int64_t>(run.kernels.mr, task_rows.end - row));
    const LogitStrip strip = logit_strip(run, w, block, row, rows, targets);
    const int64_t offset = row * stride * element_bytes(run.kernels);
    std::byte* dz = gradients + offset;
    if (!kept) strip_logits(run, w, row, rows);
    if (!exp_logits_first) {
      const Arena& a = run.arena;
      const StripCoefficients k{.lse = a.lse_high.data() + row,
                                .lse_residual = a.lse_residual.data() + row,
                                .a = a.a.data() + row,
                                .b = a.b.data() + row,
                                .c = a.c.data() + row,
                                .g = a.g.data() + row * run.targets()};
      run.kernels.gradient_strip(strip, run.transform(w, row), k, dz, stride);
      continue;
    }
    // These exp logits are those that the forward pass would have kept, so the result does not depend on the
    // budget.
    if (!kept) {
      const BlockStats stats{.max = logit_offset + row, .sum_exp = unused, .target_logit = unused_logits};
      run.kernels.softmax_strip(strip, run.transform(w, row), stats, dz, stride);
    }
    finish_rows(run, strip, exp_logits + offset, dz, logit_offset + row, row);
  }
}

// Packs the weight's rows of a block as panels with K along the vocabulary, for d_hidden.
void pack_panels(const Runner& run, int64_t block) {
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const Kernels& k = run.kernels;
  k.pack_interleaved(run.weight_from(block * s.vocab_block), s.block_columns(p.vocab, block), p.hidden,
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

void store_d_bias(const Runner& run) {
  const Problem& p = run.problem;
  const auto factor = static_cast<float>(p.scale != 0 ? p.bias_scale / p.scale : p.bias_scale);
  run.kernels.store_row(run.arena.d_bias.data(), p.vocab, factor, p.accumulate.d_bias, p.dtype.d_bias,
                        run.buffers.d_bias);
}

void zero_d_hidden(const Runner& run, bool ignored_only) {
  const Problem& p = run.problem;
  if (p.accumulate.d_hidden) return;
  const auto bytes = static_cast<size_t>(p.hidden) * size_of(p.dtype.d_hidden);
  int64_t next = 0;
  for (int64_t row = 0; row < p.tokens; ++row) {
    const bool valid = next < run.row_count && run.arena.rows[static_cast<size_t>(next)] == row;
    if (valid) ++next;
    if (valid && ignored_only) continue;
    std::memset(run.d_hidden_row(row), 0, bytes);
  }
}

void zero_d_weight(const Runner& run) {
  const Problem& p = run.problem;
  if (p.accumulate.d_weight) return;
  const auto bytes = static_cast<size_t>(p.hidden) * size_of(p.dtype.d_weight);
  for (int64_t row = 0; row < p.vocab; ++row) std::memset(run.d_weight_row(row), 0, bytes);
}

BackwardStage::BackwardStage(const Runner& run, const Chunk& chunk, const Range& blocks, TaskGroups& groups,
                             TaskGroups::Id coefficients, TaskGroups::Id panels)
    : run_(run),
      chunk_(chunk),
      blocks_(blocks),
      windows_(ceil_div(blocks.size(), run.schedule.backward_window)),
      hidden_rows_(rows_per_range(run, chunk.count, kTasksPerThread * run.schedule.threads)) {
  const int64_t alive = run.schedule.backward_windows_alive;
  Sums sums[kMostWindowsAlive];  // sums of the windows whose partials come next
  TaskGroups::Id made = TaskGroups::kNone;
  TaskGroups::Id hidden = TaskGroups::kNone;
  for (int64_t w = 0; w <= windows_; ++w) {
    if (w > 0) {
      Sums& before = sums[(w - 1) % alive];
      before = add_sums(groups, w - 1, made, panels, hidden);
      hidden = before.hidden;
    }
    if (w == windows_) break;
    const Sums& partial = sums[w % alive];
    made = groups.add(gradient_tasks(w).count(), {coefficients, partial.weight, partial.hidden, partial.bias},
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

// Adds the consumers of a window's gradients, long tasks first. The sums of d_hidden have the order of the
// blocks.
BackwardStage::Sums BackwardStage::add_sums(TaskGroups& groups, int64_t w, TaskGroups::Id made,
                                            TaskGroups::Id panels, TaskGroups::Id hidden_before) const {
  const Problem& p = run_.problem;
  const int64_t blocks = window(w).size();
  Sums sums;
  sums.weight = groups.add(
      p.has.d_weight ? blocks * weight_splits(w) : 0, {made, panels}, [this, w](int64_t task, int worker) {
        WorkerArena arena = run_.worker(worker);
        const int64_t splits = weight_splits(w);
        const int64_t ranges = run_.shape.ranges / splits;
        const int64_t first = task % splits * ranges;
        add_d_weight(run_, chunk_, arena, window(w).start + task / splits, {first, first + ranges});
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

// Where there are blocks for half of the threads, one thread computes all columns of a block of d_weight. Two
// threads that write the same rows at a time would both fault on every fresh page, and each would zero one.
int64_t BackwardStage::weight_splits(int64_t w) const {
  return 2 * window(w).size() < run_.schedule.threads ? run_.shape.ranges : 1;
}

}  // namespace logitless::cpu
