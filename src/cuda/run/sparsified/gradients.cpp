#include "cuda/run/sparsified/sparsified.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

Smoothing smoothing_of_columns(const Runner& run, const SparsifiedArena& t) {
  if (run.problem.label_smoothing == 0) return {};
  return {class_weight_of(run, {}), t.hidden_sum};
}

void product(const Runner& run, Gemm g) {
  g.allow_tf32 = run.problem.allow_tf32;
  if (run.dtype() != DType::kF32) {
    g.alpha = &run.arena.scalars->dz_unscale;
    g.zero_one = run.arena.scalars->zero_one;
  }
  gemm(g, run.arena.gemm, static_cast<size_t>(run.detail.gemm_bytes), run.queue);
}

// Returns hidden rows for a product over rows. Ignored rows, which may hold anything, become 0, because a NaN
// times 0 is a NaN.
ConstMatrix without_ignored(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                            const ConstMatrix& hidden) {
  RowsCopy c{};
  c.from = hidden;
  c.to = run.padded(t.hidden_copy, run.dtype());
  if (t.hidden_copy == nullptr) {
    c.to = {run.buffers.d_hidden, run.dtype(), operand_stride_in_d_hidden(run.problem, run.buffers)};
  }
  c.target = run.arena.target;
  c.rows = chunk.rows;
  c.columns = run.problem.hidden;
  c.padded = run.depth();
  launch_copy_rows(c, run.queue);
  return c.to;
}

// Chooses columns with many kept elements, and copies them behind the dense ones.
ConstMatrix choose_frequent(const Runner& run, const SparsifiedArena& t) {
  if (t.sizes.frequent > 0) launch_choose_frequent(t, run.queue);
  return copy_columns(run, t, t.sizes.dense + t.sizes.frequent);
}

// Makes dz of the dense columns from their logits, and behind it that of the frequent ones from the lists of
// rows.
ConstMatrix make_dz(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                    const ConstMatrix& hidden, const ConstMatrix& columns) {
  const Arena& a = run.arena;
  const int64_t dense = t.sizes.dense;
  const Matrix dz{a.exp_logits, run.dtype(), padded_columns(run.problem, dense + t.sizes.frequent)};
  const float* scale = run.dtype() != DType::kF32 ? &a.scalars->dz_scale : nullptr;
  LogitsProduct product = logits_product(run, chunk, hidden, {0, dense}, columns);
  product.transform.bias = t.dense_bias;
  product.target = t.dense_target;
  const GradientArgs args{.lse = a.lse,
                          .lse_residual = a.lse_residual,
                          .a = a.a,
                          .b = a.b,
                          .g = a.g,
                          .factor = scale,
                          .dz = {dz.data, dense, dz.stride}};
  launch_logits(run, {product, args});
  const bool may_sum_again = run.problem.needs_forward() || run.problem.has.saved;
  if (may_sum_again && run.traits().seldom_differs) {  // with logits as those behind the rows' lse
    product.row_block_active = t.lists.summed_again;
    product.seldom = true;
    launch_logits(run, {product, args});
  }
  if (run.buffers.draw_variance != nullptr) {
    launch_relative_variance(dz, chunk.rows, dense, &a.scalars->dz_unscale, t.row_threshold,
                             static_cast<float*>(run.buffers.draw_variance), run.queue);
  }
  if (t.sizes.frequent > 0) launch_spread_frequent(t, dz.from(0, dense), scale, run.queue);
  return dz;
}

void dense_bias_gradient(const Runner& run, const SparsifiedArena& t, const ConstMatrix& dz,
                         int64_t columns) {
  const Arena& a = run.arena;
  ColumnSums c{};
  c.dz = dz;
  c.rows = run.problem.tokens;
  c.columns = columns;
  c.factor = &a.scalars->dz_unscale;
  c.sums = t.dense_bias;
  launch_column_sums(c, run.queue);
  launch_scatter_dense({.column = t.columns,
                        .count = columns,
                        .columns = 1,
                        .from = {t.dense_bias, DType::kF32, 1},
                        .to = {a.d_bias, DType::kF32, 1},
                        .accumulate = false,
                        .smoothing = {}},
                       run.queue);
}

void dense_weight_gradient(const Runner& run, const SparsifiedArena& t, const ConstMatrix& dz,
                           int64_t columns, const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  Gemm g;
  g.m = columns;
  g.n = run.depth();
  g.k = p.tokens;
  g.a = dz;
  g.transpose_a = true;
  g.b = hidden;
  g.c = run.padded(t.dense_gradient, dense_gradient_dtype(p));
  product(run, g);
  launch_scatter_dense({.column = t.columns,
                        .count = columns,
                        .columns = p.hidden,
                        .from = g.c,
                        .to = run.d_weight(),
                        .accumulate = p.accumulate.d_weight,
                        .smoothing = smoothing_of_columns(run, t)},
                       run.queue);
}

void dense_hidden_gradient(const Runner& run, const SparsifiedArena& t, const ConstMatrix& dz,
                           int64_t columns, const ConstMatrix& weight) {
  const Problem& p = run.problem;
  Gemm g;
  g.m = p.tokens;
  g.n = p.hidden;
  g.k = columns;
  g.a = dz;
  g.b = weight;
  if (t.hidden_gradient != nullptr) {
    g.n = run.depth();
    g.c = run.padded(t.hidden_gradient, DType::kF32);
  } else {
    g.c = run.d_hidden();
    g.beta = p.accumulate.d_hidden ? 1.0f : 0.0f;
  }
  product(run, g);
}

// Makes the dense and frequent columns' part of all gradients, by products as in an exact plan. d_hidden gets
// only this part, and rows' lists lose their elements of frequent columns.
void dense_gradients(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                     const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  const int64_t columns = t.sizes.dense + t.sizes.frequent;
  const ConstMatrix weight = choose_frequent(run, t);
  const ConstMatrix dz = make_dz(run, t, chunk, hidden, weight);
  if (p.has.d_bias) dense_bias_gradient(run, t, dz, columns);
  if (!run.products) return;
  if (p.has.d_weight) {
    dense_weight_gradient(run, t, dz, columns, without_ignored(run, t, chunk, hidden));
  }
  if (p.has.d_hidden) dense_hidden_gradient(run, t, dz, columns, weight);
}

void gather_hidden(const Runner& run, const SparsifiedArena& t) {
  const Problem& p = run.problem;
  GatherHiddenOf<float> g{};
  g.lists = {t.kept, t.kept_count, t.sizes.capacity, nullptr, t.rows, t.vocab};
  g.columns = p.hidden;
  if (!p.accumulate.d_hidden) g.zero_rows = t.base.target;
  g.weight = run.weight();
  g.operand_dtype = run.dtype();
  g.to = run.d_hidden();
  g.base = t.hidden_gradient == nullptr ? g.to : run.padded(t.hidden_gradient, DType::kF32);
  if (p.label_smoothing > 0) g.smoothing = {run.arena.c, run.arena.weight_sum};
  launch_gather_hidden(g, run.queue);
}

void gather_weight(const Runner& run, const SparsifiedArena& t, const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  GatherWeightOf<float> g{};
  g.lists = {t.sorted, t.column_start, t.heavy, t.role, t.vocab};
  g.columns = p.hidden;
  g.rows = p.tokens;
  g.hidden = hidden;
  g.operand_dtype = hidden.dtype;
  g.padded = run.detail.source == HiddenSource::kWorkspace ? run.depth() : p.hidden;
  g.to = run.d_weight();
  g.accumulate = p.accumulate.d_weight;
  g.smoothing = smoothing_of_columns(run, t);
  launch_gather_weight(g, run.queue);
}

}  // namespace

void gradients_of_draws(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                        const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  launch_assign_roles(t, run.queue);
  t.screen.used() ? launch_finish_screened_lists(run, t) : launch_reweight(run, t);
  if (p.label_smoothing > 0) {
    launch_weighted_rows({.data = hidden,
                          .operand_dtype = run.dtype(),
                          .rows = p.tokens,
                          .columns = p.hidden,
                          .weight = run.arena.c,
                          .parts = run.arena.sum_parts,
                          .sum = t.hidden_sum},
                         run.queue);
  }
  dense_gradients(run, t, chunk, hidden);
  const bool lists = p.has.d_bias || (p.has.d_weight && run.products);
  if (lists) launch_column_lists(t, run.queue);
  if (p.has.d_hidden && run.products) gather_hidden(run, t);
  if (lists) {  // in the memory of the lists of rows
    launch_order_lists(t, p.has.d_bias ? run.arena.d_bias : nullptr, run.queue);
  }
  if (p.has.d_bias && p.label_smoothing > 0) {
    launch_smooth_bias({.c = run.arena.c,
                        .rows = p.tokens,
                        .column_weight = smoothing_of_columns(run, t).row_factor,
                        .columns = p.vocab,
                        .d_bias = run.arena.d_bias},
                       run.queue);
  }
  if (p.has.d_weight && run.products) gather_weight(run, t, hidden);
}

}  // namespace logitless::cuda
