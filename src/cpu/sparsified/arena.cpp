#include "cpu/sparsified/arena.h"

#include <algorithm>

#include "core/sparsification.h"

namespace logitless::cpu {
namespace {

// A range is closed by its columns or by its elements. In the second case two neighbors together have more
// elements than a range may have.
int64_t most_ranges(const Problem& p, int64_t capacity) {
  return ceil_div(p.vocab, kRangeColumns) + 2 * ceil_div(p.tokens * capacity, range_elements(p)) + 2;
}

}  // namespace

int64_t row_capacity(const Problem& p, const Shape& s) {
  const int64_t most = sparsified_row_capacity(p.threshold, p.vocab);
  return std::min(most + s.vocab_block, p.vocab) + 1;
}

Draws lay_out_draws(const Problem& p, const Shape& s, Workspace& workspace) {
  Draws d;
  d.seed = workspace.take<int64_t>(1);
  d.count = workspace.take<int32_t>(p.tokens);
  d.target_logit = workspace.take<float>(p.tokens);
  d.lse_estimate = workspace.take<float>(draw_windows(s.blocks) * p.tokens);
  d.elements = workspace.take<SparseElement>(p.tokens * row_capacity(p, s));
  if (p.screens()) d.probability = workspace.take<float>(p.tokens * row_capacity(p, s));
  return d;
}

SparsifiedArena lay_out_sparsified(const Problem& p, const Shape& s, int64_t token_chunk,
                                   Workspace& workspace) {
  SparsifiedArena a;
  a.capacity = row_capacity(p, s);
  if (draws_elements(p)) a.row_draws = workspace.take<RowDraw>(token_chunk);
  if (!p.has.saved) {
    a.draws = lay_out_draws(p, s, workspace);
    a.elements = a.draws.elements;
    a.count = a.draws.count;
  }
  if (!p.needs_backward()) return a;
  if (p.has.saved) {
    a.elements = workspace.take<SparseElement>(p.tokens * a.capacity);
    a.count = workspace.take<int32_t>(p.tokens);
  }
  if (p.has.d_weight || p.has.d_bias) {
    a.column_count = workspace.take<int32_t>(p.vocab);
    a.range_start = workspace.take<int64_t>(most_ranges(p, a.capacity));
  }
  if (p.label_smoothing > 0) {
    a.c = workspace.take<float>(p.tokens);
    a.sum_parts = workspace.take<float>(kSumParts * s.hidden_padded);
    a.weight_sum = workspace.take<float>(s.hidden_padded);
    a.hidden_sum = workspace.take<float>(s.hidden_padded);
  }
  return a;
}

SparsifiedWorker lay_out_sparsified_worker(const Problem& p, const Shape& s, Workspace& workspace) {
  SparsifiedWorker w;
  if (draws_elements(p)) w.q = workspace.take<float>(s.vocab_block);
  if (!p.needs_backward()) return w;
  w.sums = workspace.take<float>(s.hidden_padded);
  if (p.has.d_weight || p.has.d_bias) {
    w.elements = workspace.take<SparseElement>(range_elements(p));
    w.end = workspace.take<int32_t>(kRangeColumns);
  }
  return w;
}

}  // namespace logitless::cpu
