#include "cuda/run/top/top.h"

#include "cuda/plan/sizes.h"
#include "cuda/run/top/sizes.h"

namespace logitless::cuda {
namespace {

template <class Real>
TopRows rows_of(const RunnerOf<Real>& run, const Chunk& chunk) {
  TopRows rows{};
  rows.rows = chunk.rows;
  rows.row_count = chunk.row_count;
  rows.target = run.arena.target + chunk.first;
  rows.k = static_cast<int>(run.problem.top_k);
  return rows;
}

// Finds thresholds of a chunk's rows, from a sample of the columns.
void find_thresholds(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden, const uint8_t* active,
                     const TopSizes& sizes) {
  const TopArena& top = run.arena.top;
  const EngineTraits traits = run.traits();
  if (top.bias != nullptr)
    launch_sample_bias(run.transform.bias, sizes.step, sizes.sampled, top.bias, run.queue);
  if (top.mask != nullptr) {
    launch_sample_mask(run.mask(), run.arena.row_map + chunk.first, rows_of(run, chunk), sizes.step,
                       sizes.sampled, top.mask, run.queue);
  }
  int64_t group = 0;
  for_windows(0, sizes.sampled, sizes.window, [&](const Window& window) {
    const ConstMatrix weight = load_sample(run, window, sizes.step, {active, row_blocks(chunk.rows)});
    LogitsProduct product = logits_product(run, chunk, hidden, window, weight);
    product.transform.bias = top.bias != nullptr ? top.bias + window.first : nullptr;
    product.target = nullptr;
    product.mask = {top.mask, mask_words(sizes.sampled)};
    product.row_block_active = active;
    TopArgs args;
    args.top.k = run.problem.top_k;
    args.top.group_max = top.group_max + group;
    args.top.groups = sizes.groups;
    launch_logits(run, {product, args});
    group += ceil_div(window.columns, traits.top_tile) * traits.top_groups;
  });
  launch_thresholds(top, sizes, run.problem.top_k, chunk.rows, chunk.row_count, run.queue);
}

// Chooses the best of each list. Rows whose lists had no room are computed again, by themselves.
void choose_from_lists(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden,
                       const TopSizes& sizes) {
  const Problem& p = run.problem;
  const TopRows rows = rows_of(run, chunk);
  launch_choose_listed(run.arena.top, static_cast<int>(sizes.capacity), rows, run.queue);
  RedoTop redo{};
  redo.hidden = hidden;
  redo.weight = run.weight();
  redo.depth = p.hidden;
  redo.columns = p.vocab;
  redo.transform = run.transform.from(chunk.first, 0);
  redo.mask = run.mask();
  redo.row_map = run.arena.row_map + chunk.first;
  redo.stats = run.arena.partials;
  launch_redo_top(run.arena.top, rows, redo, run.queue);
}

}  // namespace

template <class Real>
void sum_rows_and_find_top(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                           const uint8_t* active) {
  const TopArenaOf<Real>& top = run.arena.top;
  if (run.problem.vocab == 0) return;  // possible on a rank of a group
  constexpr bool kMayList = std::is_same_v<Real, float>;
  const bool lists = kMayList && run.traits().top_groups > 0;
  const TopSizes sizes = lists ? top_sizes(run.problem, run.detail) : TopSizes{};
  if constexpr (kMayList) {
    if (lists) find_thresholds(run, chunk, hidden, active, sizes);
  }
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    const ConstMatrix weight = load_weight(run, window, {active, row_blocks(chunk.rows)});
    LogitsProductOf<Real> product = logits_product(run, chunk, hidden, window, weight);
    product.row_block_active = active;
    apply_mask(run, chunk, product);
    TopArgsOf<Real> args{row_sums(run, window)};
    args.top.k = run.problem.top_k;
    args.top.best = top.best;
    args.top.threshold = top.threshold;
    args.top.count = top.count;
    args.top.listed = top.listed;
    args.top.capacity = static_cast<int32_t>(sizes.capacity);
    launch_logits(run, {product, args});
  });
  if constexpr (kMayList) {
    if (lists) choose_from_lists(run, chunk, hidden, sizes);
  }
}

template <class Real>
void write_top(const RunnerOf<Real>& run, const Chunk& chunk) {
  const Problem& p = run.problem;
  if constexpr (std::is_same_v<Real, float>) {
    if (p.group_size > 1) {
      return launch_write_group_top(run.arena, group_stats(p, run.arena.gathered, chunk.rows), chunk.first,
                                    rows_of(run, chunk), run.buffers, run.queue);
    }
  }
  launch_write_top(run.arena, chunk.first, rows_of(run, chunk), run.buffers, run.queue);
}

#define LOGITLESS_INSTANTIATE(Real)                                                            \
  template void sum_rows_and_find_top(const RunnerOf<Real>&, const Chunk&, const ConstMatrix&, \
                                      const uint8_t*);                                         \
  template void write_top(const RunnerOf<Real>&, const Chunk&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
