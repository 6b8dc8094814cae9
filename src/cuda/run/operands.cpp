#include <algorithm>

#include "cuda/run/runner.h"

namespace logitless::cuda {

namespace {

template <class Real>
bool copies_hidden(const RunnerOf<Real>& run) {
  return run.detail.source != HiddenSource::kCaller;
}

template <class Real>
Matrix copied_hidden(const RunnerOf<Real>& run) {
  if (run.detail.source != HiddenSource::kOutput) return run.padded(run.arena.hidden, run.dtype());
  return {run.buffers.d_hidden, run.dtype(), operand_stride_in_d_hidden(run.problem, run.buffers)};
}

template <class Real>
ConstMatrix hidden_of(const RunnerOf<Real>& run, const Chunk& chunk) {
  if (!copies_hidden(run)) return run.hidden().from(chunk.first);
  return copied_hidden(run);
}

// Returns the arguments that describe the rows and their copies.
template <class Real>
LoadRows<Real> rows_of(const RunnerOf<Real>& run, const Chunk& chunk) {
  LoadRows<Real> l{};
  l.rows = chunk.rows;
  l.row_count = chunk.row_count;
  l.from = run.hidden();
  l.columns = run.problem.hidden;
  l.row_map = run.arena.row_map + chunk.first;
  l.weight = run.weight();
  if (copies_hidden(run)) {
    l.to = copied_hidden(run);
    l.padded = run.depth();
  } else {
    l.from.data = nullptr;
  }
  return l;
}

}  // namespace

template <class Real>
ConstMatrix load_rows(const RunnerOf<Real>& run, const Chunk& chunk, bool wants_target_logits) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  const ArenaOf<Real>& a = run.arena;
  LoadRows<Real> l = rows_of(run, chunk);
  if (wants_target_logits) {
    l.from = run.hidden();
    l.target_logit = a.target_logit;
    l.logit_offset = a.logit_offset;
    l.target = a.target + chunk.first;
    l.transform = run.transform.from(chunk.first, 0);
  }
  if (p.has.bias) l.bias = b.bias;
  l.bias_dtype = p.dtype.bias;
  l.bias_scale = static_cast<Real>(p.bias_scale);
  l.vocab = p.vocab;
  if (chunk.is_first) l.bias_copy = a.bias;
  l.partials = a.partials;
  if (!run.detail.is_sparsified()) {  // a backward run from saved exp logits finds their tail cleared
    const Matrix written = p.needs_forward() && run.detail.cached_columns > 0 ? run.exp_logits() : run.dz();
    l.tail = written.data;
    l.tail_pieces = written.stride * static_cast<int64_t>(size_of(run.dtype())) / 16;
  }
  const bool any =
      l.from.data != nullptr || l.bias_copy != nullptr || l.partials.sum != nullptr || l.tail != nullptr;
  if (any) launch_load_rows(l, run.queue);
  return hidden_of(run, chunk);
}

void reload_hidden(const Runner& run, const Chunk& chunk) {
  if (copies_hidden(run)) launch_load_rows(rows_of(run, chunk), run.queue);
}

template <class Real>
void make_target_logits(const RunnerOf<Real>& run, const Chunk& chunk) {
  TargetLogits<Real> t{};
  t.rows = chunk.rows;
  t.columns = run.problem.hidden;
  t.row_count = chunk.row_count;
  t.row_map = run.arena.row_map + chunk.first;
  t.target = run.arena.target + chunk.first;
  t.hidden = run.hidden();
  t.weight = run.weight();
  t.operand_dtype = run.dtype();
  t.transform = run.transform.from(chunk.first, 0);
  t.logits = run.arena.target_logits;
  launch_target_logits(run.rows, t, run.queue);
}

template <class Real>
int64_t widest_window(const RunnerOf<Real>& run) {
  return run.detail.copies_weight ? run.detail.vocab_window : run.problem.vocab;
}

namespace {

template <class Real>
bool holds_whole_weight(const RunnerOf<Real>& run) {
  return run.detail.copies_weight && run.detail.vocab_window >= run.problem.vocab;
}

// step: copies every step-th of the caller's rows, beginning at the window's first times step.
template <class Real>
void copy_weight(const RunnerOf<Real>& run, const Window& window, const Condition& condition,
                 int64_t step = 1) {
  RowsCopy c{};
  c.from = run.weight().from(window.first * step);
  c.from.stride *= step;
  c.to = run.padded(run.arena.window, run.dtype());
  c.rows = window.columns;
  c.columns = run.problem.hidden;
  c.padded = run.depth();
  c.condition = condition;
  launch_copy_rows(c, run.queue);
}

}  // namespace

template <class Real>
void load_whole_weight(const RunnerOf<Real>& run) {
  if (holds_whole_weight(run)) copy_weight(run, {0, run.problem.vocab}, {});
}

template <class Real>
ConstMatrix loaded_weight(const RunnerOf<Real>& run, const Window& window) {
  if (!run.detail.copies_weight) return run.weight().from(window.first);
  return run.padded(run.arena.window, run.dtype()).from(holds_whole_weight(run) ? window.first : 0);
}

template <class Real>
ConstMatrix load_weight(const RunnerOf<Real>& run, const Window& window, const Condition& condition) {
  if (run.detail.copies_weight && !holds_whole_weight(run)) copy_weight(run, window, condition);
  return loaded_weight(run, window);
}

ConstMatrix load_sample(const Runner& run, const Window& window, int64_t step, const Condition& condition) {
  if (run.detail.copies_weight && !holds_whole_weight(run)) {
    copy_weight(run, window, condition, step);
    return loaded_weight(run, window);
  }
  ConstMatrix all = loaded_weight(run, {window.first * step, window.columns});
  all.stride *= step;
  return all;
}

template <class Real>
const Real* class_weight_of(const RunnerOf<Real>& run, const Window& window) {
  const Real* weight = run.rows.class_weight;
  return weight != nullptr ? weight + run.problem.vocab_start + window.first : nullptr;
}

template <class Real>
RowSumsOf<Real> row_sums(const RunnerOf<Real>& run, const Window& window) {
  return {.stats = run.arena.partials,
          .class_weight = class_weight_of(run, window),
          .target_logit = run.arena.target_logit};
}

template <class Real>
LogitsProductOf<Real> logits_product(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                                     const Window& window, const ConstMatrix& weight) {
  const Problem& p = run.problem;
  LogitsProductOf<Real> product;
  product.dtype = run.dtype();
  // The logits of several targets are separate fp32 sums.
  product.allow_tf32 = p.allow_tf32 && p.targets_per_row == 0;
  product.batch_invariant = p.batch_invariant;
  product.hidden = hidden.data;
  product.hidden_stride = hidden.stride;
  product.weight = weight.data;
  product.weight_stride = weight.stride;
  product.rows = chunk.rows;
  product.columns = window.columns;
  // Copied rows are padded with zeros to the length that the fastest loads need.
  product.depth = hidden.stride == run.depth() && weight.stride == run.depth() ? run.depth() : p.hidden;
  if (run.detail.source != HiddenSource::kCaller) product.row_count = chunk.row_count;  // else all rows exist
  product.transform = run.transform.from(chunk.first, window.first);
  product.target = run.arena.target + chunk.first;
  product.column_offset = window.first;
  return product;
}

namespace {

ConstMatrix round_rows(const Runner& run, RowsCopy c, float* factor) {
  c.columns = run.problem.hidden;
  c.padded = run.arena.rounded.stride;
  launch_screen_rows(c, factor, run.queue);
  return c.to;
}

}  // namespace

ConstMatrix round_hidden(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden) {
  const RoundedRows& r = run.arena.rounded;
  RowsCopy c{};
  c.from = hidden;
  c.to = {r.hidden, r.dtype, r.stride};
  c.rows = chunk.rows;
  if (run.compacts_rows()) {
    c.row_count = chunk.row_count;
  } else {
    c.target = run.arena.target + chunk.first;
  }
  return round_rows(run, c, r.hidden_factor);
}

void round_weight(const Runner& run, const ConstMatrix& weight, int64_t rows, const Condition& condition,
                  const RoundedWeight& to) {
  RowsCopy c{};
  c.from = weight;
  c.to = to.rows;
  c.rows = rows;
  c.condition = condition;
  round_rows(run, c, to.factor);
}

void multiply_rounded(const Runner& run, const RoundedWeight& weight, LogitsProduct& product) {
  const RoundedRows& r = run.arena.rounded;
  product.dtype = r.dtype;
  product.depth = r.stride;
  product.row_factor = r.hidden_factor;
  product.column_factor = weight.factor;
}

template <class Real>
void launch_logits(const RunnerOf<Real>& run, const LogitsArgsOf<Real>& args) {
  LogitsScratch scratch;
  scratch.logits = run.arena.logits;
  scratch.rows = run.detail.scratch_rows;
  scratch.columns = run.detail.scratch_columns;
  scratch.gemm = run.arena.gemm;
  scratch.gemm_bytes = static_cast<size_t>(run.detail.gemm_bytes);
  if constexpr (std::is_same_v<Real, double>) {
    run.detail.engine->launch_float64(args, scratch, run.queue);
  } else {
    run.detail.engine->launch(args, scratch, run.queue);
  }
}

#define LOGITLESS_INSTANTIATE(Real)                                                                      \
  template ConstMatrix load_rows(const RunnerOf<Real>&, const Chunk&, bool);                             \
  template void make_target_logits(const RunnerOf<Real>&, const Chunk&);                                 \
  template int64_t widest_window(const RunnerOf<Real>&);                                                 \
  template void load_whole_weight(const RunnerOf<Real>&);                                                \
  template ConstMatrix load_weight(const RunnerOf<Real>&, const Window&, const Condition&);              \
  template const Real* class_weight_of(const RunnerOf<Real>&, const Window&);                            \
  template RowSumsOf<Real> row_sums(const RunnerOf<Real>&, const Window&);                               \
  template LogitsProductOf<Real> logits_product(const RunnerOf<Real>&, const Chunk&, const ConstMatrix&, \
                                                const Window&, const ConstMatrix&);                      \
  template void launch_logits(const RunnerOf<Real>&, const LogitsArgsOf<Real>&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE
template ConstMatrix loaded_weight(const Runner&, const Window&);

}  // namespace logitless::cuda
