#include <cmath>

#include "core/row_stats.h"
#include "cuda/plan/sizes.h"
#include "cuda/rows/logit_offset.h"
#include "cuda/run/runner.h"

namespace logitless::cuda {

template <class Real>
void sum_rows(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden, const uint8_t* active,
              bool seldom) {
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    const Condition condition{active, row_blocks(chunk.rows)};
    const ConstMatrix weight = load_weight(run, window, condition);
    for_products(run, chunk, hidden, window, weight, condition,
                 [&](LogitsProductOf<Real> product, const Window& part) {
                   product.row_block_active = active;
                   product.seldom = seldom;
                   launch_logits(run, {product, StatsArgsOf<Real>{row_sums(run, part)}});
                 });
  });
}

template <class Real>
bool tracks_max(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  // Ranks exchange sums relative to maxima if there are maxima. With batch_invariant there always are, so
  // that the set of requested outputs changes no bits.
  if (p.batch_invariant && p.group_size > 1) return true;
  bool tracks = p.has.argmax || b.max != nullptr || b.max_logit != nullptr;
#define LOGITLESS_TRACKS(name, part, kind, ...) \
  tracks = tracks || (SumKind::kind != SumKind::kPlain && b.name != nullptr);
  LOGITLESS_ROW_SUMS(LOGITLESS_TRACKS)
#undef LOGITLESS_TRACKS
  return tracks;
}

namespace {

template <class Real>
Coefficients<Real> coefficients_of(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  Coefficients<Real> c{};
  c.wanted = p.needs_backward();
  if (!c.wanted) return c;
  c.scale = static_cast<Real>(run.gradient_scale());
  if (!p.needs_forward()) {
    c.known_lse = static_cast<const Real*>(b.lse);
    c.known_lse_residual = static_cast<const Real*>(b.lse_residual);
    if (p.has.grad_entropy) c.entropy = static_cast<const Real*>(b.entropy);
#define LOGITLESS_POINTER(name) \
  if (p.has.grad_##name) c.grad_##name = static_cast<const Real*>(b.grad_##name);
    LOGITLESS_ROW_UPSTREAM(LOGITLESS_POINTER)
#undef LOGITLESS_POINTER
  }
  c.grad_loss = static_cast<const Real*>(b.grad_loss);
  const bool stores_dz = run.detail.cached_columns < p.vocab || exp_logits_become_dz(p);
  c.scale_dz = stores_dz && size_of(run.dtype()) == 2;
  return c;
}

CachedExpLogits kept_exp_logits_of(const Runner& run, const ConstMatrix& hidden) {
  CachedExpLogits k{};
  const Problem& p = run.problem;
  if (run.detail.cached_columns == 0 || !p.needs_backward() || exp_logits_become_dz(p)) return k;
  k.exp_logits = run.exp_logits();
  k.columns = run.detail.cached_columns;
  k.transform = run.transform;
  // From here on, the copied hidden rows are those of the gradient: dC = exp_logits^T (row_factor E).
  if (p.has.d_weight) {
    k.hidden = {const_cast<void*>(hidden.data), hidden.dtype, hidden.stride};
  }
  k.depth = run.depth();
  return k;
}

// Exchanges the chunk's statistics, so that all ranks have them. The first chunk also checks that the ranks
// fit together.
GroupStats exchange_stats(const Runner& run, const Chunk& chunk, const FinishChunk& f) {
  const Problem& p = run.problem;
  const GroupStats all = group_stats(p, run.arena.gathered, chunk.rows);
  const int64_t count = all.partials.stride;
  const GroupStats mine = group_stats(p, run.arena.gathered + run.group->rank * count, chunk.rows);
  launch_group_stats(run.rows, run.arena, f, mine, run.queue);
  if (chunk.is_first) launch_group_cut(run.rows, mine, run.queue);
  run.queue.call([group = run.group, gathered = run.arena.gathered, count](cudaStream_t stream) {
    group->gather(gathered, count, DType::kF32, stream);
  });
  launch_check_cuts(run.rows, run.arena, all, chunk.is_first, chunk.rows, run.queue);
  return all;
}

}  // namespace

void sum_weight(const Runner& run, int64_t columns, float* sum) {
  launch_weighted_rows({.data = run.weight(),
                        .operand_dtype = run.dtype(),
                        .rows = columns,
                        .columns = run.problem.hidden,
                        .weight = class_weight_of(run, {}),
                        .parts = run.arena.sum_parts,
                        .sum = sum},
                       run.queue);
}

void sum_weighted_logits(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden) {
  const Arena& a = run.arena;
  if (chunk.is_first) sum_weight(run, run.problem.vocab, a.weight_sum);
  run.queue.clear(a.partials.weighted,
                  static_cast<size_t>(a.partials.partials * a.partials.stride) * sizeof(float));
  launch_weighted_logits({.hidden = hidden,
                          .rows = chunk.rows,
                          .columns = run.problem.hidden,
                          .row_count = chunk.row_count,
                          .target = a.target + chunk.first,
                          .transform = run.transform.from(chunk.first, 0),
                          .class_weight = class_weight_of(run, {}),
                          .vocab = run.problem.vocab,
                          .weight_sum = a.weight_sum,
                          .bias_sum = a.sum_parts,  // no longer needed
                          .sums = a.partials.weighted},
                         run.queue);
}

template <class Real>
void finish_chunk(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                  bool relative_to_offset) {
  const Problem& p = run.problem;
  FinishChunkOf<Real> f{};
  f.first = chunk.first;
  f.rows = chunk.rows;
  f.row_count = chunk.row_count;
  f.stats.wanted = p.needs_forward();
  f.stats.relative_to_offset = relative_to_offset;
  f.stats.has_max = tracks_max(run);
  f.stats.base_2 = run.traits().base_2;
  f.stats.sum_unit = run.detail.cached_columns > 0 && f.stats.base_2 ? std::ldexp(1.0f, kKeptExponent) : 1.0f;
  f.stats.is_shard = p.is_unmerged_shard();
  f.stats.writes_loss = p.needs_forward() && !p.is_unmerged_shard() && chunk.is_last;
  f.coefficients = coefficients_of(run);
  if constexpr (std::is_same_v<Real, float>) {
    f.kept = kept_exp_logits_of(run, hidden);
    if (run.exchanges() && chunk.rows > 0) f.stats.group = exchange_stats(run, chunk, f);
  }
  launch_finish_chunk(run.rows, run.arena, run.buffers, f, run.queue);
}

#define LOGITLESS_INSTANTIATE(Real)                                                                      \
  template void sum_rows(const RunnerOf<Real>&, const Chunk&, const ConstMatrix&, const uint8_t*, bool); \
  template void finish_chunk(const RunnerOf<Real>&, const Chunk&, const ConstMatrix&, bool);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE
template bool tracks_max(const Runner&);

}  // namespace logitless::cuda
