#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/fp8.h"
#include "core/host_loss.h"
#include "cpu/run/runner.h"

namespace logitless::cpu {
namespace {

int64_t row_offset(DType dtype, int64_t stride, int64_t row, int64_t column = 0) {
  return (row * stride + column) * static_cast<int64_t>(size_of(dtype));
}

MatrixView matrix_from(const Problem& p, const void* data, DType dtype, int64_t stride, int64_t row) {
  return {static_cast<const std::byte*>(data) + row_offset(dtype, stride, row), dtype, stride,
          p.product_dtype()};
}

}  // namespace

MatrixView Runner::hidden_from(int64_t row) const {
  return matrix_from(problem, buffers.hidden, problem.dtype.hidden, buffers.hidden_stride, row);
}

MatrixView Runner::weight_from(int64_t row) const {
  return matrix_from(problem, buffers.weight, problem.dtype.weight, buffers.weight_stride, row);
}

std::byte* Runner::d_hidden_row(int64_t row) const {
  return static_cast<std::byte*>(buffers.d_hidden) +
         row_offset(problem.dtype.d_hidden, buffers.d_hidden_stride, row);
}

std::byte* Runner::d_weight_row(int64_t row, int64_t column) const {
  return static_cast<std::byte*>(buffers.d_weight) +
         row_offset(problem.dtype.d_weight, buffers.d_weight_stride, row, column);
}

// Workers are numbered by the plan. The pool may have more workers, with numbers of its own.
void Runner::loop(int64_t tasks, LoopBody body) const {
  const int64_t workers = std::min<int64_t>(schedule.threads, tasks);
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker, int) {
    for (int64_t task = next++; task < tasks; task = next++) body(task, static_cast<int>(worker));
  };
  if (workers <= 1) return work(0, 0);
  pool(workers, work);
}

WorkerArena Runner::worker(int index) const {
  Workspace memory(arena.worker_memory.data() + static_cast<size_t>(index) * arena.worker_bytes);
  return lay_out_worker(problem, kernels, shape, memory);
}

LogitTransform<float> Runner::transform(const WorkerArena& w, int64_t row) const {
  return logit_transform(problem, w.bias.data(), arena.inverse_temperature.data()).from(row, 0);
}

std::byte* Runner::kept_exp_logits(int64_t block) const {
  if (schedule.keeps_in_gradient) return d_weight_row(block * shape.vocab_block);
  return arena.kept_exp_logits.data() +
         block * schedule.token_chunk * shape.vocab_block * element_bytes(kernels);
}

// Kept blocks have their gradients in place of their exp logits in the workspace. Other blocks take turns
// with the partials of the windows that are alive.
std::byte* Runner::block_gradients(int64_t block) const {
  if (is_kept(block) && !schedule.keeps_in_gradient) return kept_exp_logits(block);
  const int64_t bytes = schedule.token_chunk * shape.vocab_block * element_bytes(kernels);
  return arena.window_exp_logits.data() + block % window_partials(schedule, shape) * bytes;
}

float* Runner::block_offset(int64_t block) const {
  if (is_kept(block)) return arena.kept_offset.data() + block * schedule.token_chunk;
  return arena.window_offset.data() + block % window_partials(schedule, shape) * schedule.token_chunk;
}

uint32_t* Runner::block_panels(int64_t block) const {
  return arena.window_panels.data() +
         block % window_partials(schedule, shape) * (shape.vocab_block / kernels.pair) * shape.hidden_padded;
}

void forget_packed_blocks(const Runner& run) {
  for (int i = 0; i < run.schedule.threads; ++i) {
    const WorkerArena w = run.worker(i);
    if (!w.packed_block.empty()) w.packed_block[0] = -1;
  }
}

namespace {

// Copies a row as products of it see it, and returns its exponent.
int load_row(const MatrixView& from, int64_t row, int64_t columns, float* to) {
  float largest = 0;
  for (int64_t k = 0; k < columns; ++k) {
    const auto value = static_cast<float>(load_as_double(from.data, from.dtype, row * from.stride + k));
    to[k] = from.rounds() ? rounded_to(from.round_to, value) : value;
    largest = std::max(largest, std::fabs(to[k]));
  }
  return fp8_row_exponent(largest);
}

}  // namespace

MatrixView rounded_rows(const Runner& run, const WorkerArena& w, const MatrixView& from, int64_t rows,
                        const int32_t* known) {
  const int64_t columns = run.problem.hidden;
  for (int64_t i = 0; i < rows; ++i) {
    float* to = w.rounded.data() + i * columns;
    const int found = load_row(from, i, columns, to), exponent = known != nullptr ? known[i] : found;
    for (int64_t k = 0; k < columns; ++k) to[k] = screened(to[k], exponent);
  }
  return {w.rounded.data(), DType::kF32, columns};
}

void keep_exponents(const Runner& run) {
  const Problem& p = run.problem;
  if (host_screen_weight_bytes(p) == 0 || p.screen_weight_bytes > 0) return;
  auto* kept = static_cast<int32_t*>(run.buffers.screen_weight);
  run.loop(run.shape.blocks, [&](int64_t block, int worker) {
    const int64_t first = block * run.shape.vocab_block;
    for (int64_t j = first; j < first + run.shape.block_columns(p.vocab, block); ++j) {
      kept[j] = load_row(run.weight_from(j), 0, p.hidden, run.worker(worker).rounded.data());
    }
  });
}

void prepare_block(const Runner& run, WorkerArena& w, int64_t block) {
  if (w.packed_block[0] == block) return;
  const Problem& p = run.problem;
  const Shape& s = run.shape;
  const int64_t first = block * s.vocab_block;
  const int64_t columns = s.block_columns(p.vocab, block);
  if (p.rounds_rows()) {
    const int64_t nr = run.kernels.nr;
    const auto* kept = static_cast<const int32_t*>(run.buffers.screen_weight);
    for (int64_t j = 0; j < s.vocab_block; j += nr) {
      const int64_t rows = std::clamp<int64_t>(columns - j, 0, nr);
      const int64_t row = first + std::min(j, columns);
      const MatrixView panel =
          rounded_rows(run, w, run.weight_from(row), rows, kept != nullptr ? kept + row : nullptr);
      run.kernels.pack_transposed(panel, rows, p.hidden, 1, w.weight.data() + j * s.hidden_units);
    }
  } else {
    run.kernels.pack_transposed(run.weight_from(first), columns, p.hidden, s.vocab_block / run.kernels.nr,
                                w.weight.data());
  }
  for (int64_t j = 0; j < s.vocab_block; ++j) {
    const bool real = j < columns;
    if (p.has.bias) {
      w.bias[static_cast<size_t>(j)] =
          real ? static_cast<float>(p.bias_scale * load_as_double(run.buffers.bias, p.dtype.bias, first + j))
               : 0.0f;
    }
    if (p.has.class_weight) {
      w.class_weight[static_cast<size_t>(j)] =
          real ? static_cast<const float*>(run.buffers.class_weight)[p.vocab_start + first + j] : 0.0f;
    }
  }
  w.packed_block[0] = block;
}

void strip_logits(const Runner& run, const WorkerArena& w, int64_t row, int rows) {
  const Shape& s = run.shape;
  GemmStrip g;
  g.a = run.arena.hidden_rows.data() + row * s.hidden_stride;
  g.a_stride = s.hidden_stride;
  g.b = w.weight.data();
  g.b_panel_stride = s.hidden_units * run.kernels.nr;
  g.k = s.hidden_units;
  g.rows = rows;
  g.panels = s.vocab_block / run.kernels.nr;
  g.c = w.logits.data();
  g.c_stride = s.vocab_block;
  run.kernels.gemm_rows(g);
}

LogitStrip logit_strip(const Runner& run, const WorkerArena& w, int64_t block, int64_t row, int rows,
                       int32_t* target_columns) {
  const Shape& s = run.shape;
  LogitStrip strip;
  strip.z = w.logits.data();
  strip.stride = s.vocab_block;
  strip.rows = rows;
  strip.columns = s.block_columns(run.problem.vocab, block);
  strip.padded_columns = s.vocab_block;
  strip.class_weight = run.problem.has.class_weight ? w.class_weight.data() : nullptr;
  strip.targets = static_cast<int>(run.targets());
  strip.target = target_columns;
  const int64_t first = block * s.vocab_block;
  for (int64_t i = 0; i < rows * run.targets(); ++i) {
    const int64_t column = run.arena.target[static_cast<size_t>(row * run.targets() + i)] - first;
    target_columns[i] = column >= 0 && column < strip.columns ? static_cast<int32_t>(column) : -1;
  }
  return strip;
}

int64_t rows_per_range(const Runner& run, int64_t rows, int64_t wanted) {
  constexpr int64_t kFewestStrips = 4;
  const int64_t strips = ceil_div(rows, run.kernels.mr);
  const int64_t ranges = std::clamp<int64_t>(wanted, 1, ceil_div(strips, kFewestStrips));
  return ceil_div(strips, ranges) * run.kernels.mr;
}

BlockTasks::BlockTasks(const Runner& run, const Range& window, int64_t rows, bool is_last)
    : window_(window), rows_(rows) {
  const int64_t threads = run.schedule.threads;
  const int64_t few = window.size() < threads ? window.size() : 0;
  const int64_t split = is_last ? std::min(window.size(), 2 * threads) : few;  // blocks in small tasks
  range_ = rows_per_range(run, rows, ceil_div(kTasksPerThread * threads, std::max<int64_t>(split, 1)));
  ranges_ = ceil_div(rows, range_);
  whole_ = window.size() - split;
}

BlockTasks::Task BlockTasks::operator[](int64_t task) const {
  if (task < whole_) return {window_.start + task, {0, rows_}};
  task -= whole_;
  const int64_t row = task % ranges_ * range_;
  return {window_.start + whole_ + task / ranges_, {row, std::min(rows_, row + range_)}};
}

}  // namespace logitless::cpu
