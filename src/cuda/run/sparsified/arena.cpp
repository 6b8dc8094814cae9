#include "cuda/run/sparsified/arena.h"

#include <algorithm>

#include "cuda/engines/engine.h"
#include "cuda/plan/sizes.h"

namespace logitless::cuda {
namespace {

// Lays out all parts except the elements.
DrawLists lay_out_lists(const Problem& p, Workspace& w) {
  const SparsifiedSizes s = sparsified_sizes(p);
  DrawLists lists;
  lists.seed = take<uint64_t>(w, 1);
  lists.dense = take<int32_t>(w, s.dense);
  lists.count = take<int32_t>(w, p.tokens);
  lists.lse_estimate = take<float>(w, p.tokens);
  lists.lse_estimate_residual = take<float>(w, p.tokens);
  lists.target_logit = take<float>(w, p.tokens);
  lists.summed_again = take<uint8_t>(w, row_blocks(p.tokens));
  return lists;
}

Draw* take_draws(const Problem& p, Workspace& w) {
  return take<Draw>(w, p.tokens * sparsified_sizes(p).capacity);
}

// Returns the bytes of the largest layout.
template <class... Layouts>
uint64_t largest(const Layouts&... layouts) {
  const auto measure = [](const auto& layout) {
    Workspace counter;
    layout(counter);
    return counter.used();
  };
  return std::max({measure(layouts)...});
}

// Lays out memory that several layouts share, one after the other in time.
template <class... Layouts>
void share(Workspace& w, const Layouts&... layouts) {
  void* memory = take<std::byte>(w, static_cast<int64_t>(largest(layouts...)));
  const auto place = [&](const auto& layout) {
    Workspace placed(memory);
    layout(placed);
  };
  (place(layouts), ...);
}

constexpr int64_t kLeastPortion = 1024;
// Returns the rows that are drawn again at a time: as many as fit in memory that is needed anyway.
int64_t redraw_portion(const Problem& p, uint64_t bytes) {
  const int64_t rows = std::max<int64_t>(p.tokens, 1);
  const int64_t row_bytes = padded_hidden(p) * static_cast<int64_t>(size_of(operand_dtype(p)));
  const int64_t room = static_cast<int64_t>(bytes) / row_bytes;
  return std::clamp<int64_t>(room / kRowBlock * kRowBlock, std::min(rows, kLeastPortion), rows);
}

ScreenArena lay_out_screen(const Problem& p, Workspace& w) {
  const int64_t rows = std::max<int64_t>(p.tokens, 1);
  ScreenArena s;
  for (float** vector :
       {&s.target_logit8, &s.no_threshold, &s.dense_lse, &s.dense_sum, &s.variance, &s.square}) {
    *vector = take<float>(w, rows);
  }
  s.ranges = column_ranges(p);
  s.range_end = take<int32_t>(w, rows * s.ranges.count);
  return s;
}

}  // namespace

uint64_t draws_bytes(const Problem& problem) {
  Workspace counter;
  lay_out_lists(problem, counter);
  take_draws(problem, counter);
  return counter.used();
}

DrawLists draw_lists(const Problem& problem, void* draws) {
  Workspace placed(draws);
  DrawLists lists = lay_out_lists(problem, placed);
  lists.elements = take_draws(problem, placed);
  return lists;
}

DType dense_gradient_dtype(const Problem& p) {
  return p.dtype.d_weight == operand_dtype(p) ? p.dtype.d_weight : DType::kF32;
}

bool writes_d_hidden(const Problem& p) {
  return p.dtype.d_hidden == operand_dtype(p) || p.dtype.d_hidden == DType::kF32;
}

SparsifiedArena lay_out_sparsified(const Problem& p, const PlanDetail& d, Workspace& w, void* draws) {
  const SparsifiedSizes s = sparsified_sizes(p);
  const DType dtype = operand_dtype(p);
  const int64_t rows = std::max<int64_t>(p.tokens, 1), depth = padded_hidden(p);
  SparsifiedArena t;
  t.rows = p.tokens;
  t.vocab = p.vocab;
  t.threshold = threshold_of(p);
  t.sizes = s;
  t.base = lay_out_rows<float>(p, d, w);
  Arena& a = t.base;
  t.lists_columns = p.needs_backward() && (p.has.d_weight || p.has.d_bias);
  t.lists = p.has.saved ? draw_lists(p, draws) : lay_out_lists(p, w);
  a.target_logit = t.lists.target_logit;
  a.active = take<uint8_t>(w, row_blocks(rows));
  a.logit_offset = take<float>(w, rows);
  if (p.needs_backward()) {
    for (float** vector : {&a.a, &a.g}) *vector = take<float>(w, rows);
    if (p.has.grad_entropy) a.b = take<float>(w, rows);
    if (p.label_smoothing > 0) a.c = take<float>(w, rows);
    if (p.has.d_bias) a.d_bias = take<float>(w, p.vocab);
    t.kept_count = take<int32_t>(w, rows);
    t.dense_target = take<int32_t>(w, rows);
    if (t.lists_columns) t.heavy = take<int32_t>(w, s.kept / kHeavyColumn + 2);
  }
  if (p.label_smoothing > 0) {
    take_weight_sums(p, a, w, w);
    t.hidden_sum = take<float>(w, p.hidden);
  }
  t.row_threshold = take<float>(w, rows);
  if (p.screens()) {
    const int64_t window = screen_window(p, rounded_dtype(d.engine->traits().has_e4m3));
    // All rows of the weight may be rounded, in d_weight. Beside a copy that is kept only dense columns are.
    a.rounded = p.has.screen_weight ? lay_out_rounded(p, d, rows, s.dense, s.dense, w)
                                    : lay_out_rounded(p, d, rows, window, p.vocab, w);
    t.screen = lay_out_screen(p, w);
  }
  const auto operands = [&](Workspace& v) {
    t.columns_copy = take_elements(v, dtype, (s.dense + std::max(s.sampled, s.frequent)) * depth);
    if (p.needs_backward())
      a.exp_logits = take_elements(v, dtype, rows * padded_columns(p, s.dense + s.frequent));
  };
  const auto column_lists = [&](Workspace& v) {
    if (t.lists_columns) t.by_column = take<KeptRow>(v, s.kept);
  };
  const auto screened_logits = [&](Workspace& v) {
    if (p.screens()) t.screen.logits = take<float>(v, rows * s.capacity);
  };
  if (p.needs_forward()) {
    t.portion = redraw_portion(p, largest(operands, column_lists, screened_logits));
    t.portions = ceil_div(rows, t.portion);
    t.redrawn = take<int32_t>(w, rows);
    // A smaller shard has more portions than the largest.
    t.redrawn_count = take<int32_t>(w, 1 + ceil_div(rows, kLeastPortion));
    t.portion_offset = take<float>(w, t.portion);
    t.portion_threshold = take<float>(w, t.portion);
    if (p.has.temperature) t.portion_inverse_temperature = take<float>(w, t.portion);
  }
  t.role = take<int32_t>(w, p.vocab);
  t.column_count = take<int32_t>(w, p.vocab + 1);
  t.column_start = take<int32_t>(w, p.vocab + 1);
  t.bins = take<int32_t>(w, kCountBins);
  t.totals = take<uint64_t>(w, kMostCountBlocks);
  t.columns = take<int32_t>(w, s.dense + std::max(s.sampled, s.frequent));
  if (s.frequent > 0) t.frequent_list = take<int32_t>(w, s.frequent + 1);
  if (p.has.bias) t.dense_bias = take<float>(w, s.dense + s.frequent);
  t.sample_others = take<float>(w, s.sampled);
  const int64_t bytes = scan_bytes(p.vocab + 1);
  t.scan_bytes = static_cast<size_t>(bytes);
  t.scan = take<std::byte>(w, bytes);
  const bool lists = p.needs_backward() || !p.has.saved;  // in the workspace
  share(
      w,
      [&](Workspace& v) {
        if (p.needs_forward()) t.sample_logits = take<float>(v, rows * s.sampled);
      },
      [&](Workspace& v) {
        if (!lists) return;
        Draw* elements = take_draws(p, v);
        if (!p.has.saved) t.lists.elements = elements;
        t.kept = reinterpret_cast<Kept*>(elements);
        t.screen.draws = elements;
      },
      [&](Workspace& v) {
        if (t.lists_columns) t.sorted = take<KeptRow>(v, s.kept);
      });
  share(w, operands, column_lists, screened_logits, [&](Workspace& v) {
    if (p.needs_forward()) t.portion_hidden = take_elements(v, dtype, t.portion * depth);
  });
  if (p.has.d_weight) {
    t.dense_gradient = take_elements(w, dense_gradient_dtype(p), (s.dense + s.frequent) * depth);
    if (!fits_in_d_hidden(p)) t.hidden_copy = take_elements(w, dtype, rows * depth);
  }
  if (p.has.d_hidden && !writes_d_hidden(p)) t.hidden_gradient = take<float>(w, rows * depth);
  if (d.source == HiddenSource::kWorkspace) a.hidden = take_elements(w, dtype, rows * depth);
  if (d.copies_weight) a.window = take_elements(w, dtype, d.vocab_window * depth);
  a.logits = take<float>(w, d.scratch_numbers(p.tokens, p.vocab));
  a.gemm = take<std::byte>(w, d.gemm_bytes);
  return t;
}

}  // namespace logitless::cuda
