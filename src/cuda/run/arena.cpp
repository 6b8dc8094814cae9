#include "cuda/run/arena.h"

#include <algorithm>

#include "core/group_stats.h"
#include "cuda/engines/engine.h"
#include "cuda/plan/sizes.h"

namespace logitless::cuda {

DType operand_dtype(const Problem& p) {
  if (p.product_dtype() != DType::kF32) return p.product_dtype();
  return p.dtype.hidden == p.dtype.weight ? p.dtype.hidden : DType::kF32;
}

namespace {

// A row that begins within a line of the L2 cache costs more: each copy of a tile, by our kernels or
// cuBLAS's, reads a part of another line. With rows of multiples of 16 bytes, products took up to 1.2 times
// as long.
constexpr int64_t kLineBytes = 128;

int64_t rounded_up(int64_t elements, int64_t bytes, DType dtype) {
  const auto lanes = bytes / static_cast<int64_t>(size_of(dtype));
  return (elements + lanes - 1) / lanes * lanes;
}

// Returns the columns of a window of dz, if gradients come from windows.
int64_t dz_columns(const Problem& p, const PlanDetail& d) {
  const bool windows = d.cached_columns < p.vocab || (saves_exp_logits(p, d) && exp_logits_become_dz(p));
  return p.needs_backward() && windows ? d.vocab_window : 0;
}

}  // namespace

int64_t padded_hidden(const Problem& p) {
  const DType dtype = operand_dtype(p);
  if (dtype == DType::kF64) return p.hidden;  // its products take rows of any length
  return rounded_up(p.hidden, 16, dtype) == p.hidden ? p.hidden : rounded_up(p.hidden, kLineBytes, dtype);
}

int64_t padded_columns(const Problem& p, int64_t columns) {
  return rounded_up(columns, 16, operand_dtype(p));
}

bool writes_d_weight(const Problem& p) {
  if (p.hidden != padded_hidden(p)) return false;
  return p.dtype.d_weight == operand_dtype(p) || p.dtype.d_weight == p.stats_dtype();
}

DType staging_dtype(const Problem& p) {
  return stages_apart(p) ? p.stats_dtype() : operand_dtype(p);
}

bool stages_apart(const Problem& p) {
  return p.has.d_weight && !writes_d_weight(p) &&
         (p.dtype.d_weight != operand_dtype(p) || p.accumulate.d_weight);
}

bool fits_in_d_hidden(const Problem& p) {
  return p.has.d_hidden && !p.accumulate.d_hidden && size_of(p.dtype.d_hidden) >= size_of(operand_dtype(p)) &&
         !p.unaligned_rows && p.hidden == padded_hidden(p);
}

int64_t operand_stride_in_d_hidden(const Problem& p, const Buffers& b) {
  return b.d_hidden_stride * static_cast<int64_t>(size_of(p.dtype.d_hidden) / size_of(operand_dtype(p)));
}

bool saves_exp_logits(const Problem& p, const PlanDetail& d) {
  return p.has.saved && d.cached_columns > 0;
}

int64_t bytes_before_exponents(const Problem& p, const PlanDetail& d) {
  return padded_columns(p, d.cached_columns) * static_cast<int64_t>(size_of(operand_dtype(p)));
}

int64_t exp_logits_stride(const Problem& p, const PlanDetail& d) {
  const DType dtype = operand_dtype(p);
  int64_t kept = d.cached_columns;
  if (has_exponents(p) && kept > 0) {
    const int64_t bytes = bytes_before_exponents(p, d) + ceil_div(kept, kExponentColumns);
    kept = ceil_div(bytes, static_cast<int64_t>(size_of(dtype)));
  }
  return rounded_up(saves_exp_logits(p, d) ? kept : std::max(kept, dz_columns(p, d)), kLineBytes, dtype);
}

int64_t dz_stride(const Problem& p, const PlanDetail& d) {
  return saves_exp_logits(p, d) ? rounded_up(dz_columns(p, d), kLineBytes, operand_dtype(p))
                                : exp_logits_stride(p, d);
}

int64_t kept_window(const Problem& p, const PlanDetail& d) {
  const bool in_place = !d.copies_weight && (!p.has.d_weight || writes_d_weight(p));
  return in_place ? d.cached_columns : d.vocab_window;
}

GroupStats group_stats(const Problem& p, float* gathered, int64_t rows) {
  GroupStats g;
  int64_t number = 0;
  const auto next = [&] { return gathered + number++ * rows; };
  g.partials.partials = p.group_size;
  g.partials.stride = numbers_of_rank(p, DType::kF32, rows);
  g.partials.max = next();
  g.partials.sum = next();
  g.target_logit = next();
  const WantedSums sums = wanted_sums(p);
#define LOGITLESS_NEXT(name, part, ...) \
  if (sums.name) g.partials.part = next();
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_NEXT)
#undef LOGITLESS_NEXT
  static_assert(sizeof(int32_t) == sizeof(float));
  if (p.has.argmax) g.partials.argmax = reinterpret_cast<int32_t*>(next());
  if (p.top_k > 0) {
    g.top_logit = next();
    number += p.top_k - 1;
    g.top_id = reinterpret_cast<int32_t*>(next());
  }
  g.cut = reinterpret_cast<uint32_t*>(gathered + group_numbers(p, DType::kF32) * rows);
  return g;
}

// Lays out the part of all plans: rows, their statistics, and the results made from them.
template <class Real>
ArenaOf<Real> lay_out_rows(const Problem& p, const PlanDetail& d, Workspace& w) {
  const int64_t rows = std::max<int64_t>(d.token_chunk, 1);
  const int64_t chunks = std::max<int64_t>((p.tokens + rows - 1) / rows, 1);
  ArenaOf<Real> a;
  a.scalars = take<Scalars>(w, 1);
  a.chunk_rows = take<int32_t>(w, chunks);
  a.row_map = take<int32_t>(w, p.tokens);
  a.target = take<int32_t>(w, p.tokens);
  if (p.has.bias && (p.dtype.bias != p.stats_dtype() || p.bias_scale != 1)) a.bias = take<Real>(w, p.vocab);
  if (p.has.temperature) a.inverse_temperature = take<Real>(w, p.tokens);
  if (p.targets_per_row > 0) {
    a.joined.target = take<int64_t>(w, p.tokens);
    a.joined.weight_sum = take<double>(w, p.tokens);
    a.target_logits = take<Real>(w, rows * p.targets_per_row);
  }
  a.lse = take<Real>(w, rows);
  a.lse_residual = take<Real>(w, rows);
  if (p.needs_forward()) {
    a.row_loss = take<Real>(w, p.tokens);
    if (!d.is_sparsified() && !saves_exp_logits(p, d)) a.target_logit = take<Real>(w, rows);
    a.partials.partials = d.partials;
    a.partials.stride = rows;
    a.partials.max = take<Real>(w, d.partials * rows);
    a.partials.sum = take<Real>(w, d.partials * rows);
    const WantedSums sums = wanted_sums(p);
#define LOGITLESS_TAKE(name, part, ...) \
  if (sums.name) a.partials.part = take<Real>(w, d.partials * rows);
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_TAKE)
#undef LOGITLESS_TAKE
    if (d.is_sparsified()) a.partials.expected = take<float>(w, d.partials * rows);
    if (p.has.argmax) a.partials.argmax = take<int32_t>(w, d.partials * rows);
    if (p.in_group()) a.gathered = take<float>(w, p.group_size * numbers_of_rank(p, DType::kF32, rows));
  }
  return a;
}
template Arena lay_out_rows(const Problem&, const PlanDetail&, Workspace&);
template ArenaOf<double> lay_out_rows(const Problem&, const PlanDetail&, Workspace&);

RoundedWeight take_rounded_weight(const Problem& p, DType dtype, int64_t rows, Workspace& w,
                                  int64_t factors) {
  const int64_t stride = rounded_stride(p);
  RoundedWeight taken{{take_elements(w, dtype, rows * stride), dtype, stride}};
  if (dtype == DType::kE4M3) taken.factor = take<float>(w, std::max(rows, factors));
  return taken;
}

RoundedRows lay_out_rounded(const Problem& p, const PlanDetail& d, int64_t rows, int64_t window,
                            int64_t factors, Workspace& w) {
  RoundedRows r;
  r.dtype = rounded_dtype(d.engine->traits().has_e4m3);
  r.stride = rounded_stride(p);
  r.hidden = take_elements(w, r.dtype, rows * r.stride);
  if (r.dtype == DType::kE4M3) r.hidden_factor = take<float>(w, rows);
  r.weight = take_rounded_weight(p, r.dtype, window, w, factors);
  return r;
}

void take_weight_sums(const Problem& p, Arena& a, Workspace& w, Workspace& of_sum) {
  a.sum_parts = take<float>(w, kSumParts * p.hidden);
  a.weight_sum = take<float>(of_sum, p.hidden);
}

}  // namespace logitless::cuda
