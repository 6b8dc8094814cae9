#include <algorithm>

#include "cuda/run/exact/run.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

template <class Real>
void product(const RunnerOf<Real>& run, Gemm g) {
  g.allow_tf32 = run.problem.allow_tf32;
  gemm(g, run.arena.gemm, static_cast<size_t>(run.detail.gemm_bytes), run.queue);
}

// Returns whether the gradients of the last columns are made from windows of dz. If not, they are made from
// all exp logits.
template <class Real>
bool makes_dz_last(const RunnerOf<Real>& run) {
  return run.detail.cached_columns < run.problem.vocab || makes_dz_of_saved(run);
}

// Returns the first of the columns that the last windows cut.
template <class Real>
int64_t first_of_last(const RunnerOf<Real>& run) {
  const int64_t kept = run.detail.cached_columns;
  return kept < run.problem.vocab ? kept : 0;
}

// Returns the last columns of the vocabulary that do not fill 16 bytes of a row of dz. Their products would
// be separate launches (gemm.cpp) over all of d_hidden, so the kernel that stores d_hidden adds them. This
// works only if it can read the caller's rows.
template <class Real>
Window tail_of_vocabulary(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  const PlanDetail& d = run.detail;
  if (size_of(run.dtype()) != 2 || d.copies_weight) return {p.vocab, 0};
  const int64_t window = makes_dz_last(run) ? d.vocab_window : kept_window(p, d);
  const int64_t last = (p.vocab - first_of_last(run) - 1) % window + 1;
  const int64_t rest = p.vocab % 8 < last ? p.vocab % 8 : 0;
  return {p.vocab - rest, rest};
}

// Returns the terms of these columns, from where their dz is when d_hidden is stored.
template <class Real>
Terms tail_terms(const RunnerOf<Real>& run) {
  const Window rest = tail_of_vocabulary(run);
  if (rest.columns == 0) return {};
  const int64_t first = first_of_last(run), width = run.detail.vocab_window;
  const int64_t window = first + (run.problem.vocab - first - 1) / width * width;
  return {
      .count = rest.columns,
      .dz = makes_dz_last(run) ? run.dz().from(0, rest.first - window) : run.exp_logits().from(0, rest.first),
      .matrix = run.weight().from(rest.first)};
}

// d_hidden += dz [rows, columns] weight [columns, D]
template <class Real>
void add_d_hidden(const RunnerOf<Real>& run, const Chunk& chunk, const Window& window, const ConstMatrix& dz,
                  const ConstMatrix& weight) {
  Gemm g;
  g.m = chunk.rows;
  g.n = run.depth();
  g.k = std::min(window.columns, tail_of_vocabulary(run).first - window.first);
  g.a = dz;
  g.b = weight;
  g.c = run.padded(run.arena.d_hidden, run.problem.stats_dtype());
  g.beta = window.is_first ? 0.0f : 1.0f;
  product(run, g);
}

// d_weight [columns, D] += factor dz^T hidden [rows, D]
template <class Real>
void add_d_weight(const RunnerOf<Real>& run, const Chunk& chunk, const Window& window, const ConstMatrix& dz,
                  const ConstMatrix& hidden, int64_t rows, const float* factor) {
  const Problem& p = run.problem;
  const ArenaOf<Real>& a = run.arena;
  Gemm g;
  g.m = window.columns;
  g.n = run.depth();
  g.k = rows;
  g.a = dz;
  g.transpose_a = true;
  g.b = hidden;
  const Matrix out = run.d_weight().from(window.first);
  const bool accumulate = p.accumulate.d_weight || !chunk.is_first;
  if (a.d_weight != nullptr) {
    g.c = run.padded(a.d_weight, p.stats_dtype()).from(window.first);
    g.beta = chunk.is_first ? 0.0f : 1.0f;
  } else if (a.staging != nullptr) {
    g.c = run.padded(a.staging, staging_dtype(p));
  } else {
    g.c = out;
    g.beta = accumulate ? 1.0f : 0.0f;
  }
  if (factor != nullptr) {
    g.alpha = factor;
    g.zero_one = a.scalars->zero_one;
  }
  product(run, g);
  if (a.staging != nullptr) launch_store_matrix(g.c, out, window.columns, p.hidden, accumulate, run.queue);
}

// d_bias [columns] += sums over rows of row_factor dz, times factor. c: as ColumnSums.
template <class Real>
void add_d_bias(const RunnerOf<Real>& run, const Chunk& chunk, const Window& window, const ConstMatrix& dz,
                const float* row_factor, const float* factor, const float* c_of_rows = nullptr) {
  const Problem& p = run.problem;
  ColumnSums c{};
  c.dz = dz;
  c.rows = chunk.rows;
  c.columns = window.columns;
  c.row_count = chunk.row_count;
  c.row_factor = row_factor;
  c.factor = factor;
  if constexpr (std::is_same_v<Real, float>) {
    c.c = c_of_rows;
    c.column_weight = class_weight_of(run, window);
  }
  c.sums = run.arena.d_bias + window.first;
  c.adds = !chunk.is_first;
  if (chunk.is_last) {
    c.to = Matrix{run.buffers.d_bias, p.dtype.d_bias}.from(0, window.first);
    c.to_factor = run.bias_gradient_scale();
    c.accumulate = p.accumulate.d_bias;
  }
  launch_column_sums(c, run.queue);
}

// Returns the further rows of exp logits, without those of hidden.
SmoothingRows smoothing_rows_of(const Runner& run, const Chunk& chunk) {
  return {.exp_logits = run.exp_logits(),
          .hidden = {nullptr, run.dtype(), 0},
          .row = chunk.rows,
          .columns = run.detail.cached_columns,
          .width = run.problem.hidden,
          .depth = run.depth(),
          .column_weight = class_weight_of(run, {}),
          .hidden_sum = run.arena.hidden_sum};
}

template <class Real>
void write_entries(const RunnerOf<Real>& run, const Chunk& chunk, const Window& window, const Matrix& to,
                   bool are_exp_logits) {
  TargetEntries<Real> e{};
  e.first = chunk.first;
  e.rows = chunk.rows;
  e.row_count = chunk.row_count;
  e.first_column = window.first;
  e.columns = window.columns;
  e.dz = to;
  e.are_exp_logits = are_exp_logits;
  if (size_of(run.dtype()) == 2) e.scale = &run.arena.scalars->dz_scale;
  e.transform = run.transform;
  launch_target_entries(run.rows, run.arena, e, run.queue);
}

// Turns a window's kept exp logits into dz.
void make_dz(const Runner& run, const Chunk& chunk, const Window& window, const Matrix& dz) {
  launch_make_dz(run.arena,
                 {.exp_logits = run.exp_logits().from(0, window.first),
                  .exponents = run.exponents(),
                  .dz = dz,
                  .first = chunk.first,
                  .rows = chunk.rows,
                  .first_column = window.first,
                  .columns = window.columns,
                  .row_count = chunk.row_count,
                  .column_weight = class_weight_of(run, window),
                  .transform = run.transform,
                  .scale = size_of(run.dtype()) == 2 ? &run.arena.scalars->dz_scale : nullptr},
                 run.queue);
}

}  // namespace

void write_target_entries(const Runner& run, const Chunk& chunk) {
  write_entries(run, chunk, {0, run.detail.cached_columns}, run.exp_logits(), /*are_exp_logits=*/true);
}

void save_smoothing_rows(const Runner& run, const Chunk& chunk) {
  launch_smoothing_rows(smoothing_rows_of(run, chunk), run.queue);
}

void restore_exp_logits(const Runner& run, const Chunk& chunk) {
  launch_restore_exp_logits(run.rows, run.arena,
                            {.exp_logits = run.exp_logits(),
                             .rows = chunk.rows,
                             .columns = run.detail.cached_columns,
                             .row_count = chunk.row_count},
                            run.queue);
}

namespace {

// Makes label smoothing's sums, and the further rows of both operands of d_weight.
void smooth_apart(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  const Arena& a = run.arena;
  const int64_t columns = run.detail.cached_columns;
  if (p.has.d_hidden && chunk.is_first && columns < p.vocab) sum_weight(run, columns, a.kept_sum_of_weight);
  if (!p.has.d_weight) return;
  launch_weighted_rows({.data = run.hidden(),
                        .operand_dtype = run.dtype(),
                        .rows = chunk.rows,
                        .columns = p.hidden,
                        .row_map = a.row_map + chunk.first,
                        .row_count = chunk.row_count,
                        .weight = a.c,
                        .parts = a.sum_parts,
                        .sum = a.hidden_sum},
                       run.queue);
  SmoothingRows rows = smoothing_rows_of(run, chunk);
  rows.hidden.data = const_cast<void*>(hidden.data);
  rows.hidden.stride = hidden.stride;
  if (saves_exp_logits(p, run.detail)) rows.exp_logits.data = nullptr;  // it has them
  launch_smoothing_rows(rows, run.queue);
}

}  // namespace

void gradients_of_exp_logits(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  const Arena& a = run.arena;
  const bool smooths = p.smooths();
  const int64_t columns = run.detail.cached_columns, rows = chunk.rows + (smooths ? kSmoothingRows : 0);
  const Window all{0, columns};
  const Matrix exp_logits = run.exp_logits();
  if (smooths && run.products) smooth_apart(run, chunk, hidden);
  if (p.has.d_bias) add_d_bias(run, chunk, all, exp_logits, a.row_factor, nullptr, smooths ? a.c : nullptr);
  // Windows are those of the staging or of a copied weight. Only d_hidden reads the weight: after a pass over
  // the whole vocabulary, the last window is still there. The staging may share the memory of the weight's
  // window, which is no longer needed when its gradient comes.
  const bool staged = p.has.d_weight && a.staging != nullptr;
  if (p.has.d_weight && !staged && run.products)
    add_d_weight(run, chunk, all, exp_logits, hidden, rows, nullptr);
  if (!run.products || (!p.has.d_hidden && !staged)) return;
  for_windows_backwards(columns, kept_window(p, run.detail), [&](const Window& window) {
    const ConstMatrix part = exp_logits.from(0, window.first);
    if (p.has.d_hidden) {
      const bool is_loaded = p.needs_forward() && window.first + window.columns == p.vocab;
      add_d_hidden(run, chunk, window, part,
                   is_loaded ? loaded_weight(run, window) : load_weight(run, window));
    }
    if (staged) add_d_weight(run, chunk, window, part, hidden, rows, nullptr);
  });
}

void rescale_for_lse(const Runner& run, const Chunk& chunk) {
  if (run.problem.has.d_hidden && run.products) {
    launch_scale_rows({.matrix = run.padded(run.arena.d_hidden, DType::kF32),
                       .rows = chunk.rows,
                       .columns = run.depth(),
                       .row_count = chunk.row_count,
                       .factor = run.arena.row_factor,
                       .common = &run.arena.scalars->dz_scale},
                      run.queue);
  }
  if (run.problem.has.d_weight) reload_hidden(run, chunk);
}

template <class Real>
void gradients_of_lse(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  const ArenaOf<Real>& a = run.arena;
  const int64_t kept = run.detail.cached_columns;
  // dz of 16 bits is stored times dz_scale, which is 1 for other dtypes.
  const float* factor = run.dtype() != DType::kF64 ? &a.scalars->dz_unscale : nullptr;
  const auto gradients = [&](const Window& window, const Matrix& dz, const ConstMatrix& weight) {
    if (p.targets_per_row > 0) write_entries(run, chunk, window, dz, /*are_exp_logits=*/false);
    if (p.has.d_hidden && run.products) add_d_hidden(run, chunk, window, dz, weight);
    if (p.has.d_weight && run.products) add_d_weight(run, chunk, window, dz, hidden, chunk.rows, factor);
    if (p.has.d_bias) add_d_bias(run, chunk, window, dz, nullptr, factor);
  };
  if constexpr (std::is_same_v<Real, float>) {
    // dz takes the place of exp logits that are not saved.
    const bool saved = makes_dz_of_saved(run);
    const int64_t width = saved ? run.detail.vocab_window : kept_window(p, run.detail);
    const auto of_kept = [&](const Window& window) {
      const Matrix dz = saved ? run.dz() : run.exp_logits().from(0, window.first);
      make_dz(run, chunk, window, dz);
      const bool is_loaded = p.needs_forward() && window.first + window.columns == p.vocab;
      const auto weight = [&] { return is_loaded ? loaded_weight(run, window) : load_weight(run, window); };
      gradients(window, dz, p.has.d_hidden ? weight() : ConstMatrix{});
    };
    if (kept > 0 && exp_logits_become_dz(p)) {
      // After a pass over the whole vocabulary, the last window of the weight is still there.
      saved ? for_windows(0, kept, width, of_kept) : for_windows_backwards(kept, width, of_kept);
    }
  }
  for_windows(kept, p.vocab, run.detail.vocab_window, [&](const Window& window) {
    const ConstMatrix weight = load_weight(run, window);
    const Matrix dz = run.dz();
    for_products(run, chunk, hidden, window, weight, {},
                 [&](const LogitsProductOf<Real>& product, const Window& part) {
                   const Matrix to = dz.from(0, part.first - window.first);
                   const GradientArgsOf<Real> args{
                       .lse = a.lse,
                       .lse_residual = a.lse_residual,
                       .a = a.a,
                       .b = a.b,
                       .c = a.c,
                       .g = a.g,
                       .class_weight = class_weight_of(run, part),
                       .factor = size_of(run.dtype()) == 2 ? &a.scalars->dz_scale : nullptr,
                       .dz = {to.data, part.columns, to.stride}};
                   launch_logits(run, {product, args});
                 });
    gradients(window, dz, weight);
  });
}

template <class Real>
void store_d_hidden(const RunnerOf<Real>& run, const Chunk& chunk, const float* row_factor) {
  const Problem& p = run.problem;
  if (!p.has.d_hidden || !run.products) return;
  StoreHidden s{};
  s.terms = tail_terms(run);
  s.from = run.padded(run.arena.d_hidden, p.stats_dtype());
  s.row_map = run.arena.row_map + chunk.first;
  s.row_count = chunk.row_count;
  s.factor = row_factor;
  s.rows = chunk.rows;
  s.columns = p.hidden;
  s.to = run.d_hidden();
  s.accumulate = p.accumulate.d_hidden;
  if constexpr (std::is_same_v<Real, float>) {
    if (run.detail.cached_columns > 0 && p.smooths() && smooths_apart(p))
      s.smoothing = {.row_factor = run.arena.c, .sum = run.arena.kept_sum_of_weight};
  }
  // Only with the last chunk: before it, the rows may hold copies of hidden rows.
  s.zeroes_ignored = chunk.is_last && !p.accumulate.d_hidden;
  launch_store_d_hidden(s, run.rows, run.arena.scalars, run.queue);
}

#define LOGITLESS_INSTANTIATE(Real)                                                        \
  template void gradients_of_lse(const RunnerOf<Real>&, const Chunk&, const ConstMatrix&); \
  template void store_d_hidden(const RunnerOf<Real>&, const Chunk&, const float*);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
