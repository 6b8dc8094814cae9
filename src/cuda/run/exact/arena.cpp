#include "cuda/run/exact/arena.h"

#include <algorithm>

#include "cuda/plan/sizes.h"

namespace logitless::cuda {

template <class Real>
ArenaOf<Real> lay_out_exact(const Problem& p, const PlanDetail& d, Workspace& w, Workspace& saved) {
  const DType dtype = operand_dtype(p);
  const int64_t rows = std::max<int64_t>(d.token_chunk, 1);
  const int64_t chunks = std::max<int64_t>((p.tokens + rows - 1) / rows, 1);
  const int64_t depth = padded_hidden(p);
  const bool kept = d.cached_columns > 0, saves = saves_exp_logits(p, d);
  const int64_t smoothing_rows = kept && has_smoothing_rows(p) ? kSmoothingRows : 0;
  ArenaOf<Real> a = lay_out_rows<Real>(p, d, w);
  // Flags of blocks to do again, or with rows in place, of blocks that are not all ignored.
  if (kept || d.relative_to_offset || d.source == HiddenSource::kCaller)
    a.active = take<uint8_t>(w, row_blocks(rows));
  if (p.needs_forward() && (kept || d.relative_to_offset)) a.logit_offset = take<float>(w, rows);
  if constexpr (std::is_same_v<Real, float>) {
    if (kept) {
      Workspace& of_rows = saves ? saved : w;
      a.kept_sum = take<float>(of_rows, rows);
      a.target_exp = take<float>(of_rows, rows);
      if (p.smooths()) take_weight_sums(p, a, w, of_rows);
      if (saves) {
        a.target_logit = take<float>(saved, rows);
        a.exp_logits = take_elements(saved, dtype, (rows + smoothing_rows) * exp_logits_stride(p, d));
      }
      if (p.needs_backward()) a.row_factor = saves ? take<float>(w, rows) : a.kept_sum;
      if (p.needs_backward() && has_smoothing_rows(p)) {  // also where they are not apart
        a.kept_sum_of_weight = d.cached_columns == p.vocab ? a.weight_sum : take<float>(w, p.hidden);
        a.hidden_sum = take<float>(w, p.hidden);
      }
      if (saves && p.needs_backward() && !exp_logits_become_dz(p))
        a.replaced = take_elements(w, dtype, rows * p.target_count());
    }
  }
  if (p.needs_backward()) {
    for (Real** vector : {&a.a, &a.g}) *vector = take<Real>(w, rows);
    if (p.has.grad_entropy) a.b = take<Real>(w, rows);
    if (p.smooths()) a.c = take<Real>(w, rows);
    a.dz = take_elements(w, dtype, (rows + (saves ? 0 : smoothing_rows)) * dz_stride(p, d));
    if (!saves) a.exp_logits = a.dz;
    if (p.has.d_hidden) a.d_hidden = take<Real>(w, rows * depth);
    if (p.has.d_weight) {
      const bool native = writes_d_weight(p);
      const bool in_place = native && (p.dtype.d_weight == p.stats_dtype() || d.rounds_between_chunks);
      if (chunks > 1 && !in_place) {
        a.d_weight = take<Real>(w, p.vocab * depth);
      } else if (stages_apart(p)) {
        a.staging = take<Real>(w, d.vocab_window * depth);
      }
    }
    if (p.has.d_bias) a.d_bias = take<Real>(w, p.vocab);
  }
  a.top = lay_out_top<Real>(p, d, rows, w);
  if (p.num_samples > 0) {
    a.sample_key = take<SampleKey>(w, rows * p.num_samples);
    a.sample_best = take<unsigned long long>(w, rows * p.num_samples);
  }
  if (d.source == HiddenSource::kWorkspace)
    a.hidden = take_elements(w, dtype, (rows + smoothing_rows) * depth);
  if (p.has_fp8_logits()) a.rounded = lay_out_rounded(p, d, rows, d.rounded_window, d.rounded_window, w);
  if (d.copies_weight) a.window = take_elements(w, dtype, d.vocab_window * depth);
  const bool stages = p.needs_backward() && p.has.d_weight && !writes_d_weight(p);
  if (stages && a.d_weight == nullptr && !stages_apart(p)) a.staging = a.window;
  a.logits = take<Real>(w, d.scratch_numbers(rows, p.vocab));
  a.gemm = take<std::byte>(w, d.gemm_bytes);
  return a;
}
template Arena lay_out_exact(const Problem&, const PlanDetail&, Workspace&, Workspace&);
template ArenaOf<double> lay_out_exact(const Problem&, const PlanDetail&, Workspace&, Workspace&);

}  // namespace logitless::cuda
