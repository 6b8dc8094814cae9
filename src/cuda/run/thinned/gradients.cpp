#include "cuda/run/thinned/run.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

bool lists_columns(const Runner& run) {
  return run.problem.has.d_classifier || run.problem.has.d_bias;
}

void assign_roles(const Runner& run, const ThinArena& t) {
  AssignRoles a{};
  a.dense_columns = run.problem.has.draws ? t.lists.dense : t.columns;
  a.columns = t.columns;
  a.dense = t.sizes.dense;
  a.vocab = run.problem.vocab;
  a.tokens = run.problem.tokens;
  a.target = run.arena.target;
  a.role = t.role;
  a.dense_target = t.dense_target;
  a.column_count = lists_columns(run) ? t.column_count : nullptr;
  a.heavy_count = t.heavy;
  launch_assign_roles(a, run.queue);
}

void weigh(const Runner& run, const ThinArena& t) {
  const Problem& p = run.problem;
  const Arena& a = run.arena;
  Weigh w{};
  w.rows = p.tokens;
  w.lists = &t.lists;
  w.capacity = static_cast<int32_t>(t.sizes.capacity);
  w.threshold = threshold_of(p);
  w.first_stream = static_cast<uint32_t>(p.vocab_start);
  w.base_2 = run.traits().base_2;
  w.target = a.target;
  w.role = t.role;
  w.lse = a.lse;
  w.lse_low = a.lse_low;
  w.a = a.a;
  w.b = a.b;
  w.g = a.g;
  w.transform = run.transform;
  w.kept = t.kept;
  w.kept_count = t.kept_count;
  w.column_count = lists_columns(run) ? t.column_count : nullptr;
  w.shown_count = run.buffers.kept_count;
  w.shown_variance = static_cast<float*>(run.buffers.draw_variance);
  w.square = t.row_threshold;  // which has served
  w.dense = static_cast<int32_t>(t.sizes.dense);
  launch_weigh(w, run.queue);
}

Smoothing smoothing_of_columns(const Runner& run, const ThinArena& t) {
  if (run.problem.label_smoothing == 0) return {};
  const float* weight = run.rows.class_weight;
  return {weight != nullptr ? weight + run.problem.vocab_start : nullptr, t.hidden_sum};
}

void product(const Runner& run, Gemm g) {
  g.operand_dtype = run.dtype();
  g.allow_tf32 = run.problem.allow_tf32;
  if (run.dtype() != DType::kF32) {
    g.alpha = &run.arena.scalars->dz_unscale;
    g.zero_one = run.arena.scalars->zero_one;
  }
  gemm(g, run.arena.gemm, static_cast<size_t>(run.detail.gemm_bytes), run.queue);
}

// Hidden rows for a product over rows: 0 for ignored ones, which may hold anything, so that nothing times 0
// is left.
Operand without_ignored(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  const bool to_output = t.hidden_copy == nullptr;
  RowsCopy c{};
  c.from = hidden.data;
  c.from_dtype = run.dtype();
  c.from_stride = hidden.stride;
  c.to = to_output ? run.buffers.d_hidden : t.hidden_copy;
  c.to_dtype = run.dtype();
  c.to_stride = to_output ? operand_stride_in_d_hidden(run.problem, run.buffers) : run.depth();
  c.target = run.arena.target;
  c.rows = chunk.rows;
  c.columns = run.problem.hidden;
  c.padded = run.depth();
  launch_copy_rows(c, run.queue);
  return {c.to, c.to_stride};
}

// Columns of which many elements were kept, and copies of them behind those of the dense ones.
Operand choose_hot(const Runner& run, const ThinArena& t) {
  if (t.sizes.hot > 0) {
    HotColumns h{};
    h.rows = run.problem.tokens;
    h.vocab = run.problem.vocab;
    h.dense = t.sizes.dense;
    h.hot = t.sizes.hot;
    h.count = t.column_count;
    h.bins = t.bins;
    h.listed = t.hot_list + 1;
    h.listed_count = t.hot_list;
    h.columns = t.columns + t.sizes.dense;
    h.role = t.role;
    launch_choose_hot(h, run.queue);
  }
  return copy_columns(run, t, t.sizes.dense + t.sizes.hot);
}

// dz of the dense columns, from their logits, and behind it that of the hot ones, from the lists of rows.
Operand make_dz(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden,
                const Operand& columns) {
  const Arena& a = run.arena;
  const int64_t dense = t.sizes.dense, stride = padded_columns(run.problem, dense + t.sizes.hot);
  const float* scale = run.dtype() != DType::kF32 ? &a.scalars->dz_scale : nullptr;
  LogitsProduct product = logits_product(run, chunk, hidden, {0, dense}, columns);
  product.transform.bias = t.dense_bias;
  product.target = t.dense_target;
  const GradientArgs args{.lse = a.lse,
                          .lse_low = a.lse_low,
                          .a = a.a,
                          .b = a.b,
                          .g = a.g,
                          .factor = scale,
                          .dz = {.data = a.exps, .columns = dense, .stride = stride}};
  launch_logits(run, {product, args});
  if (run.buffers.draw_variance != nullptr) {
    launch_relative_variance(a.exps, run.dtype(), stride, chunk.rows, dense, &a.scalars->dz_unscale,
                             t.row_threshold, static_cast<float*>(run.buffers.draw_variance), run.queue);
  }
  if (t.sizes.hot > 0) {
    SpreadHot s{};
    s.rows = chunk.rows;
    s.dense = dense;
    s.hot = t.sizes.hot;
    s.role = t.role;
    s.capacity = static_cast<int32_t>(t.sizes.capacity);
    s.kept = t.kept;
    s.kept_count = t.kept_count;
    s.dz = at(a.exps, run.dtype(), dense);
    s.dtype = run.dtype();
    s.dz_stride = stride;
    s.scale = scale;
    launch_spread_hot(s, run.queue);
  }
  return {a.exps, stride};
}

void dense_bias_gradient(const Runner& run, const ThinArena& t, const Operand& dz, int64_t columns) {
  const Arena& a = run.arena;
  ColumnSums c{};
  c.dz = dz.data;
  c.dtype = run.dtype();
  c.stride = dz.stride;
  c.rows = run.problem.tokens;
  c.columns = columns;
  c.factor = &a.scalars->dz_unscale;
  c.sums = t.dense_bias;
  launch_column_sums(c, run.queue);
  launch_scatter_dense({.column = t.columns,
                        .count = columns,
                        .columns = 1,
                        .from = t.dense_bias,
                        .from_dtype = DType::kF32,
                        .from_stride = 1,
                        .to = a.d_bias,
                        .dtype = DType::kF32,
                        .to_stride = 1,
                        .accumulate = false,
                        .smoothing = {}},
                       run.queue);
}

void dense_classifier_gradient(const Runner& run, const ThinArena& t, const Operand& dz, int64_t columns,
                               const Operand& hidden) {
  const Problem& p = run.problem;
  Gemm g;
  g.m = columns;
  g.n = run.depth();
  g.k = p.tokens;
  g.a = dz.data;
  g.a_stride = dz.stride;
  g.transpose_a = true;
  g.b = hidden.data;
  g.b_stride = hidden.stride;
  g.c = t.dense_gradient;
  g.c_dtype = dense_gradient_dtype(p);
  g.c_stride = run.depth();
  product(run, g);
  launch_scatter_dense({.column = t.columns,
                        .count = columns,
                        .columns = p.hidden,
                        .from = t.dense_gradient,
                        .from_dtype = dense_gradient_dtype(p),
                        .from_stride = run.depth(),
                        .to = run.buffers.d_classifier,
                        .dtype = p.dtype.d_classifier,
                        .to_stride = run.buffers.d_classifier_stride,
                        .accumulate = p.accumulate.d_classifier,
                        .smoothing = smoothing_of_columns(run, t)},
                       run.queue);
}

void dense_hidden_gradient(const Runner& run, const ThinArena& t, const Operand& dz, int64_t columns,
                           const Operand& classifier) {
  const Problem& p = run.problem;
  Gemm g;
  g.m = p.tokens;
  g.n = p.hidden;
  g.k = columns;
  g.a = dz.data;
  g.a_stride = dz.stride;
  g.b = classifier.data;
  g.b_stride = classifier.stride;
  if (t.hidden_gradient != nullptr) {
    g.n = run.depth();
    g.c = t.hidden_gradient;
    g.c_stride = run.depth();
  } else {
    g.c = run.buffers.d_hidden;
    g.c_dtype = p.dtype.d_hidden;
    g.c_stride = run.buffers.d_hidden_stride;
    g.beta = p.accumulate.d_hidden ? 1.0f : 0.0f;
  }
  product(run, g);
}

// The dense and hot columns' part of all gradients, by products as in an exact plan. d_hidden gets this part
// alone, and rows' lists lose their elements of hot columns.
void dense_gradients(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  const Problem& p = run.problem;
  const int64_t columns = t.sizes.dense + t.sizes.hot;
  const Operand classifier = choose_hot(run, t);
  const Operand dz = make_dz(run, t, chunk, hidden, classifier);
  if (p.has.d_bias) dense_bias_gradient(run, t, dz, columns);
  if (!run.products) return;
  if (p.has.d_classifier) {
    dense_classifier_gradient(run, t, dz, columns, without_ignored(run, t, chunk, hidden));
  }
  if (p.has.d_hidden) dense_hidden_gradient(run, t, dz, columns, classifier);
}

void gather_hidden(const Runner& run, const ThinArena& t) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  GatherHidden g{};
  g.rows = p.tokens;
  g.columns = p.hidden;
  g.vocab = p.vocab;
  g.kept = t.kept;
  g.kept_count = t.kept_count;
  g.capacity = static_cast<int32_t>(t.sizes.capacity);
  if (!p.accumulate.d_hidden) g.target = run.arena.target;
  g.classifier = b.classifier;
  g.classifier_dtype = p.dtype.classifier;
  g.classifier_stride = b.classifier_stride;
  g.operand_dtype = run.dtype();
  const bool in_place = t.hidden_gradient == nullptr;
  g.base = in_place ? b.d_hidden : t.hidden_gradient;
  g.base_dtype = in_place ? p.dtype.d_hidden : DType::kF32;
  g.base_stride = in_place ? b.d_hidden_stride : run.depth();
  g.to = b.d_hidden;
  g.dtype = p.dtype.d_hidden;
  g.to_stride = b.d_hidden_stride;
  if (p.label_smoothing > 0) g.smoothing = {run.arena.c, t.classifier_sum};
  launch_gather_hidden(g, run.queue);
}

void list_columns(const Runner& run, const ThinArena& t) {
  ColumnLists c{};
  c.rows = run.problem.tokens;
  c.vocab = run.problem.vocab;
  c.most = t.sizes.kept;
  c.capacity = static_cast<int32_t>(t.sizes.capacity);
  c.kept = t.kept;
  c.kept_count = t.kept_count;
  c.column_count = t.column_count;
  c.column_start = t.column_start;
  c.scan = t.scan;
  c.scan_bytes = t.scan_bytes;
  c.by_column = t.by_column;
  launch_column_lists(c, run.queue);
}

void order_columns(const Runner& run, const ThinArena& t) {
  OrderLists o{};
  o.rows = run.problem.tokens;
  o.vocab = run.problem.vocab;
  o.column_start = t.column_start;
  o.by_column = t.by_column;
  o.sorted = t.sorted;
  o.heavy = t.heavy + 1;
  o.heavy_count = t.heavy;
  o.d_bias = run.problem.has.d_bias ? run.arena.d_bias : nullptr;
  launch_order_lists(o, run.queue);
}

void gather_classifier(const Runner& run, const ThinArena& t, const Operand& hidden) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  GatherClassifier g{};
  g.vocab = p.vocab;
  g.columns = p.hidden;
  g.role = t.role;
  g.column_start = t.column_start;
  g.sorted = t.sorted;
  g.heavy = t.heavy + 1;
  g.heavy_count = t.heavy;
  g.hidden = hidden.data;
  g.hidden_dtype = run.dtype();
  g.hidden_stride = hidden.stride;
  g.padded = run.detail.source == HiddenSource::kWorkspace ? run.depth() : p.hidden;
  g.to = b.d_classifier;
  g.dtype = p.dtype.d_classifier;
  g.to_stride = b.d_classifier_stride;
  g.accumulate = p.accumulate.d_classifier;
  g.smoothing = smoothing_of_columns(run, t);
  launch_gather_classifier(g, run.queue);
}

}  // namespace

void gradients_of_draws(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  const Problem& p = run.problem;
  assign_roles(run, t);
  weigh(run, t);
  if (p.label_smoothing > 0) {
    launch_weighted_rows({.data = hidden.data,
                          .dtype = run.dtype(),
                          .stride = hidden.stride,
                          .operand_dtype = run.dtype(),
                          .rows = p.tokens,
                          .columns = p.hidden,
                          .weight = run.arena.c,
                          .parts = t.sum_parts,
                          .sum = t.hidden_sum},
                         run.queue);
  }
  dense_gradients(run, t, chunk, hidden);
  const bool lists = p.has.d_bias || (p.has.d_classifier && run.products);
  if (lists) list_columns(run, t);
  if (p.has.d_hidden && run.products) gather_hidden(run, t);
  if (lists) order_columns(run, t);  // where the lists of rows were
  if (p.has.d_bias && p.label_smoothing > 0) {
    launch_smooth_bias(run.arena.c, p.tokens, smoothing_of_columns(run, t).row_factor, p.vocab,
                       run.arena.d_bias, run.queue);
  }
  if (p.has.d_classifier && run.products) gather_classifier(run, t, hidden);
}

}  // namespace logitless::cuda
