#include "cuda/run/exact/run.h"

#include <algorithm>

#include "core/status.h"
#include "cuda/plan/sizes.h"
#include "cuda/run/samples/samples.h"
#include "cuda/run/top/top.h"

namespace logitless::cuda {
namespace {

// Whether a pass that keeps exp logits begins with the targets' logits as logit offsets. If one block has all
// columns, the portable engine takes their maximum, as in a pass that keeps none.
template <class Real>
bool begins_with_target_logits(const RunnerOf<Real>& run) {
  const PlanDetail& d = run.detail;
  if (run.traits().offsets_first) return d.relative_to_offset;
  return run.problem.needs_forward() && d.cached_columns > 0 &&
         std::min(d.scratch_columns, widest_product(run)) < run.problem.vocab;
}

void keep_exp_logits_of(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden,
                        const uint8_t* active) {
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    const Condition condition{active, row_blocks(chunk.rows)};
    const ConstMatrix weight = load_weight(run, window, condition);
    for_products(run, chunk, hidden, window, weight, condition,
                 [&](LogitsProduct product, const Window& part) {
                   product.row_block_active = active;
                   ExpLogitsArgs args{row_sums(run, part)};
                   if (run.detail.relative_to_offset && !tracks_max(run)) args.stats.max = nullptr;
                   if (begins_with_target_logits(run)) args.logit_offset = run.arena.logit_offset;
                   if (!run.traits().offsets_first) args.chosen_offset = run.arena.logit_offset;
                   args.kept_before = std::min(run.detail.cached_columns, part.first);
                   const Matrix exp_logits = run.exp_logits().from(0, args.kept_before);
                   args.exp_logits = {exp_logits.data,
                                      std::min(run.detail.cached_columns - args.kept_before, part.columns),
                                      exp_logits.stride};
                   args.exponents = run.exponents();
                   if (args.exponents.data != nullptr)
                     args.exponents.data += args.kept_before / kExponentColumns;
                   launch_logits(run, {product, args});
                 });
  });
}

bool may_be_done_again(const Runner& run) {
  const Problem& p = run.problem;
  if (!run.traits().offsets_first) return false;
  // A shard's logit offsets may be 0. With fp8 they are logits of unrounded rows, which no column may reach.
  return p.is_shard() || p.has_fp8_logits() || p.softcap == 0 || p.has.temperature ||
         may_leave_range(2 * p.softcap, p.vocab, run.arena.partials);
}

// Makes the row statistics of a chunk and keeps its exp logits, or makes only the sums if these are wanted
// relative to logit offsets. Only active blocks of rows are done.
//
// With offsets_first the logit offset is the target's logit, which is nearly always within 86 nats of lse.
// Blocks with a row where it is not are done again, with lse as that row's offset. The host does not wait to
// learn whether there are any.
void keep_exp_logits(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden,
                     const uint8_t* active) {
  keep_exp_logits_of(run, chunk, hidden, active);
  if (!may_be_done_again(run)) return;
  const Arena& a = run.arena;
  launch_find_redo(a, chunk.rows, chunk.row_count, a.target + chunk.first, run.queue);
  sum_rows(run, chunk, hidden, a.active);
  launch_offset_from_partials(a, chunk.rows, chunk.row_count, /*again=*/true, run.queue,
                              run.problem.in_group());
  keep_exp_logits_of(run, chunk, hidden, a.active);
}

template <class Real>
void run_chunk(const RunnerOf<Real>& run, const Chunk& chunk) {
  constexpr bool kIsFloat = std::is_same_v<Real, float>;
  const bool kept = run.detail.cached_columns > 0, all_kept = run.detail.cached_columns == run.problem.vocab;
  const bool relative_to_offset = run.detail.relative_to_offset;
  const ConstMatrix hidden = load_rows(run, chunk, begins_with_target_logits(run));
  if constexpr (kIsFloat) {
    if (run.problem.has_fp8_logits()) round_hidden(run, chunk, hidden);
  }
  if (run.problem.needs_forward()) {
    const uint8_t* active = run.detail.source == HiddenSource::kCaller ? run.arena.active : nullptr;
    if (kept || relative_to_offset) {
      if constexpr (kIsFloat) {
        keep_exp_logits(run, chunk, hidden, active);
        if (run.problem.smooths()) {
          sum_weighted_logits(run, chunk, hidden);
          if (saves_exp_logits(run.problem, run.detail) && has_smoothing_rows(run.problem))
            save_smoothing_rows(run, chunk);
        }
      } else {
        throw Error(Status::kInternal, "exp logits of float64 are kept");
      }
    } else if (run.problem.top_k > 0) {
      sum_rows_and_find_top(run, chunk, hidden, active);
    } else if (run.problem.num_samples > 0) {
      if constexpr (kIsFloat) sum_rows_and_sample(run, chunk, hidden, active);
    } else {
      sum_rows(run, chunk, hidden, active);
    }
  }
  if (run.problem.targets_per_row > 0) make_target_logits(run, chunk);
  finish_chunk(run, chunk, hidden, relative_to_offset);
  if (run.problem.top_k > 0) write_top(run, chunk);
  if constexpr (kIsFloat) {
    if (run.problem.num_samples > 0) write_samples(run, chunk);
  }
  if (!run.problem.needs_backward()) return;
  const bool by_factor = kept && !exp_logits_become_dz(run.problem);
  if constexpr (kIsFloat) {
    if (by_factor) {
      if (run.problem.targets_per_row > 0) write_target_entries(run, chunk);
      gradients_of_exp_logits(run, chunk, hidden);
      if (!all_kept) rescale_for_lse(run, chunk);
    }
  }
  if (!all_kept || !by_factor) gradients_of_lse(run, chunk, hidden);
  store_d_hidden(run, chunk, all_kept && by_factor ? run.arena.row_factor : nullptr);
  if constexpr (kIsFloat) {
    if (run.arena.replaced != nullptr) restore_exp_logits(run, chunk);
  }
}

}  // namespace

template <class Real>
void run_exact(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  if (p.tokens > 0 && (b.kept_count != nullptr || b.draw_variance != nullptr || b.loss_error != nullptr)) {
    launch_exact_draw_stats(run.rows, p.vocab, run.buffers, run.queue);
  }
  // The last chunk comes first. A computed row never comes from an earlier row of the caller. So rows of
  // d_hidden are written only past the copies that later chunks make there (HiddenSource::kOutput).
  const int64_t chunk_rows = std::max<int64_t>(run.detail.token_chunk, 1);
  for (int64_t i = run.chunks - 1; i >= 0; --i) {
    const int64_t first = i * chunk_rows;
    run_chunk(run, {.is_first = i + 1 == run.chunks,
                    .is_last = i == 0,
                    .first = first,
                    .rows = std::min(chunk_rows, p.tokens - first),
                    .row_count = run.arena.chunk_rows + i});
  }
}
template void run_exact(const Runner&);
template void run_exact(const RunnerOf<double>&);

}  // namespace logitless::cuda
