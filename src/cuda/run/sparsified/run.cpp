#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/run/sparsified/sparsified.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

Condition active_rows(const Runner& run, const Chunk& chunk) {
  return {run.arena.active, row_blocks(chunk.rows)};
}

void choose_columns(const Runner& run, const SparsifiedArena& t) {
  const Problem& p = run.problem;
  ChooseColumns c{};
  c.target = run.arena.target;
  c.tokens = p.tokens;
  c.vocab = p.vocab;
  c.dense = t.sizes.dense;
  c.sampled = t.sizes.sampled;
  c.count = t.column_count;
  c.bins = t.bins;
  c.totals = t.totals;
  c.role = t.role;
  c.dense_columns = t.columns;
  c.sample = t.columns + t.sizes.dense;
  c.sample_others = t.sample_others;
  c.dense_copy = t.lists.dense;
  c.seed = t.lists.seed;
  c.given_seed = static_cast<const int64_t*>(run.buffers.seed);
  c.known_seed = p.seed;
  launch_choose_columns(c, run.queue);
}

// Makes sums of the dense columns, in the partials.
void sum_dense(const Runner& run, const SparsifiedArena& t, const Chunk& chunk, const ConstMatrix& hidden,
               const ConstMatrix& columns) {
  const Window window{0, t.sizes.dense};
  LogitsProduct product = logits_product(run, chunk, hidden, window, columns);
  product.transform.bias = t.dense_bias;
  product.target = nullptr;
  launch_logits(run, {product, StatsArgs{{.stats = run.arena.partials.without_options()}}});
}

void multiply_sample(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                     const ConstMatrix& hidden, const ConstMatrix& columns) {
  Gemm g;
  g.allow_tf32 = run.problem.allow_tf32;
  g.m = chunk.rows;
  g.n = t.sizes.sampled;
  g.k = run.problem.hidden;
  g.a = hidden;
  g.b = columns.from(t.sizes.dense);
  g.transpose_b = true;
  g.c = {t.sample_logits, DType::kF32, t.sizes.sampled};
  gemm(g, run.arena.gemm, static_cast<size_t>(run.detail.gemm_bytes), run.queue);
}

// Joins the lse estimates of a group's ranks to those of all columns.
void merge_estimates(const Runner& run, const SparsifiedArena& t) {
  const int64_t rows = run.problem.tokens;
  float* lse_estimates = run.arena.gathered;
  run.queue.call([group = run.group, lse_estimates, rows](cudaStream_t stream) {
    group->gather(lse_estimates, rows, DType::kF32, stream);
  });
  launch_merge_estimates(t, run.group->rank, run.problem.group_size, run.queue);
}

void estimate_lse(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                  const ConstMatrix& hidden) {
  const Problem& p = run.problem;
  if (p.vocab > 0) {  // it may be 0 on a rank of a group
    const ConstMatrix columns = copy_columns(run, t, t.sizes.dense + t.sizes.sampled);
    sum_dense(run, t, chunk, hidden, columns);
    if (t.sizes.sampled > 0) multiply_sample(run, t, chunk, hidden, columns);
  }
  const bool merges = run.exchanges();
  LseEstimate g{};
  g.rows = p.tokens;
  g.sampled = t.sizes.sampled;
  g.partials = &run.arena.partials;
  g.logits = t.sample_logits;
  g.sample = t.columns + t.sizes.dense;
  g.sample_others = t.sample_others;
  g.transform = run.transform;
  g.threshold = t.threshold;
  g.target = run.arena.target;
  g.target_logit = run.arena.target_logit;
  g.role = t.role;
  g.dense_lse = t.screen.dense_lse;
  g.no_threshold = t.screen.no_threshold;
  g.lse_estimate = merges ? run.arena.gathered + run.group->rank * p.tokens : t.lists.lse_estimate;
  g.lse_estimate_residual = t.lists.lse_estimate_residual;
  g.logit_offset = run.arena.logit_offset;
  g.row_threshold = t.row_threshold;
  g.count = t.lists.count;
  g.redrawn_count = t.redrawn_count;
  launch_estimate_lse(g, run.queue);
  if (merges) merge_estimates(run, t);
}

// Launches the kernel of the first draw on a window of the weight. set(product, args) completes the
// arguments.
template <class Set>
void launch_draw(const Runner& run, const SparsifiedArena& t, const Chunk& chunk, const ConstMatrix& hidden,
                 const Window& window, const ConstMatrix& weight, const Set& set) {
  LogitsProduct product = logits_product(run, chunk, hidden, window, weight);
  DrawArgs args{row_sums(run, window)};
  args.logit_offset = run.arena.logit_offset;
  args.stats.weighted = nullptr;
  if (!run.problem.needs_forward() || !tracks_max(run)) args.stats.max = nullptr;
  args.draws.seed = t.lists.seed;
  args.draws.first_stream = static_cast<uint32_t>(run.problem.vocab_start);
  args.draws.role = t.role;
  args.draws.threshold = t.row_threshold;
  args.draws.lse_estimate_residual = t.lists.lse_estimate_residual;
  args.draws.count = t.lists.count;
  args.draws.elements = t.lists.elements;
  args.draws.capacity = static_cast<int32_t>(t.sizes.capacity);
  set(product, args);
  launch_logits(run, {product, args});
}

// Does so over all windows. condition: whether there are rows to draw from.
template <class Set>
void launch_draws(const Runner& run, const SparsifiedArena& t, const Chunk& chunk, const ConstMatrix& hidden,
                  const Condition& condition, const Set& set) {
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    launch_draw(run, t, chunk, hidden, window, load_weight(run, window, condition), set);
  });
}

// Memory of rounded rows of the weight, and how many columns it holds at a time.
struct ScreenedWeight {
  RoundedWeight rows;
  int64_t window;
};
ScreenedWeight screened_weight(const Runner& run) {
  const Problem& p = run.problem;
  const RoundedRows& s = run.arena.rounded;
  if (p.has.screen_weight) {
    Workspace kept(run.buffers.screen_weight);
    return {take_rounded_weight(p, s.dtype, p.vocab, kept), p.vocab};
  }
  const Matrix d_weight = run.d_weight();
  if (rounds_into_d_weight(p, s.dtype)) {
    const auto address = reinterpret_cast<uintptr_t>(d_weight.data);
    const uintptr_t past = (kRoundedAlignment - address % kRoundedAlignment) % kRoundedAlignment;
    const int64_t pitch = d_weight.stride * static_cast<int64_t>(size_of(d_weight.dtype));
    if (d_weight.stride == p.hidden) {  // without gaps
      return {{{static_cast<std::byte*>(d_weight.data) + past, s.dtype, s.stride}, s.weight.factor}, p.vocab};
    }
    if (past == 0 && pitch % kRoundedAlignment == 0) {
      const int64_t stride = pitch / static_cast<int64_t>(size_of(s.dtype));
      return {{{d_weight.data, s.dtype, stride}, s.weight.factor}, p.vocab};
    }
  }
  return {s.weight, screen_window(p, s.dtype)};
}

// The first draw behind a screen: from the products of rounded rows. The dense columns' part of the sums is
// replaced by their exact sums, which the lse estimate has made.
void draw_behind_screen(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                        const ConstMatrix& operands) {
  const Problem& p = run.problem;
  const ScreenArena& s = t.screen;
  const ConstMatrix hidden = round_hidden(run, chunk, operands);
  const auto [all, width] = screened_weight(run);
  const auto launch = [&](const Window& window, const RoundedWeight& weight, const auto& set) {
    launch_draw(run, t, chunk, hidden, window, weight.rows, [&](LogitsProduct& product, DrawArgs& args) {
      multiply_rounded(run, weight, product);
      product.row_block_active = run.arena.active;
      args.target_logit = s.target_logit8;
      args.draws.certain_share = kCertainShare;
      set(product, args);
    });
  };
  // A copy that is kept has no room for other rows than its own.
  const RoundedWeight& dense = p.has.screen_weight ? run.arena.rounded.weight : all;
  round_weight(run, run.padded(t.columns_copy, run.dtype()), t.sizes.dense, {}, dense);
  launch({0, t.sizes.dense}, dense, [&](LogitsProduct& product, DrawArgs& args) {
    product.transform.bias = t.dense_bias;
    product.target = nullptr;
    args.draws.threshold = s.no_threshold;
  });
  launch_take_dense_sums(t, run.queue);
  // Later runs read all of a copy that is kept, so it does not depend on this run's rows.
  const Condition condition = p.has.screen_weight ? Condition{} : active_rows(run, chunk);
  for_windows(0, p.vocab, std::min(width, widest_window(run)), [&](const Window& window) {
    const RoundedWeight weight = all.from(width < p.vocab ? 0 : window.first);
    if (p.screen_weight_bytes == 0) {
      round_weight(run, load_weight(run, window, condition), window.columns, condition, weight);
    }
    launch(window, weight, [](LogitsProduct&, DrawArgs&) {});
  });
  launch_add_dense_sums(t, run.traits().base_2, run.queue);
}

// Runs the checks after the draw that do not need lse. Lists rows whose lse estimate was too low, and makes
// new sums for blocks of rows whose sums left the range of exp logits. If a row that is drawn again gets
// other bits of large logits, its sums are made again as well. Then estimates that were too high are also
// found here, unless the row's sum needs other ranks.
void find_bad_estimates(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                        const ConstMatrix& hidden) {
  const double least_sum = run.exchanges() ? 0 : kLeastSum;
  launch_find_bad_estimates(t, most_expected(run.problem.threshold), least_sum, run.traits().seldom_differs,
                            run.queue);
  sum_rows(run, chunk, hidden, t.lists.summed_again, /*seldom=*/true);
  launch_offset_redraws(t, run.traits().base_2, run.queue);
}

// Draws again for rows with a bad lse estimate, copied side by side, as many as fit at a time. If there are
// none, the launches find nothing to do.
void draw_again(const Runner& run, const SparsifiedArena& t, const ConstMatrix& hidden) {
  // Behind a screen all bad estimates are known by now.
  if (!t.screen.used()) launch_find_high_estimates(t, run.traits().base_2, run.queue);
  for (int64_t i = 0; i < t.portions; ++i) {
    launch_gather_redraws(t, i, hidden, run.depth() * static_cast<int64_t>(size_of(run.dtype())), run.queue);
    const int32_t* count = t.redrawn_count + 1 + i;
    const Chunk portion{.rows = t.portion, .row_count = count};
    const ConstMatrix rows = run.padded(t.portion_hidden, run.dtype());
    launch_draws(run, t, portion, rows, {count, sizeof(int32_t)},
                 [&](LogitsProduct& product, DrawArgs& args) {
                   product.row_count = count;
                   product.seldom = true;
                   product.target = nullptr;
                   product.transform.inverse_temperature = t.portion_inverse_temperature;
                   args.stats = PartialStats{};  // the sums are known
                   args.logit_offset = t.portion_offset;
                   args.draws.threshold = t.portion_threshold;
                   args.draws.row = t.redrawn + i * t.portion;
                 });
  }
}

// Draws with lse as the lse estimate, in a backward pass.
void draw_with_lse(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                   const ConstMatrix& hidden) {
  launch_known_estimate(t, run.queue);
  launch_draws(run, t, chunk, hidden, active_rows(run, chunk), [&](LogitsProduct& product, DrawArgs& args) {
    product.row_block_active = run.arena.active;
    args.stats = PartialStats{};
  });
}

// The part of forward passes before the rows' lse is known. Makes the first draw with an lse estimate, and
// the rows' sums relative to it. In a group the estimate covers all ranks' columns.
void sum_and_draw(const Runner& run, const SparsifiedArena& t, const Chunk& chunk,
                  const ConstMatrix& hidden) {
  if (run.problem.vocab > 0) choose_columns(run, t);
  estimate_lse(run, t, chunk, hidden);
  if (t.screen.used()) {
    draw_behind_screen(run, t, chunk, hidden);
  } else {
    launch_draws(run, t, chunk, hidden, active_rows(run, chunk), [&](LogitsProduct& product, DrawArgs& args) {
      product.row_block_active = run.arena.active;
      args.draws.certain_share = kCertainShare;
    });
  }
  find_bad_estimates(run, t, chunk, hidden);
  if (!t.screen.used()) return;
  launch_screened_lse(t, run.traits().base_2, run.queue);
  draw_again(run, t, hidden);
  launch_settle_screen(run, t);
}

}  // namespace

ConstMatrix copy_columns(const Runner& run, const SparsifiedArena& t, int64_t count) {
  RowsCopy c{};
  c.from = run.weight();
  c.row_map = c.target = t.columns;
  c.to = run.padded(t.columns_copy, run.dtype());
  c.rows = count;
  c.columns = run.problem.hidden;
  c.padded = run.depth();
  launch_copy_rows(c, run.queue);
  if (t.dense_bias != nullptr) {
    launch_gather_vector(run.transform.bias, t.columns, t.sizes.dense, t.dense_bias, run.queue);
  }
  return c.to;
}

void run_sparsified(const Runner& run, const SparsifiedArena& t) {
  const Problem& p = run.problem;
  if (p.tokens == 0) return;
  const Chunk chunk{.rows = p.tokens, .row_count = run.arena.chunk_rows};
  // The lse estimate needs the target logits.
  const ConstMatrix hidden = load_rows(run, chunk, /*wants_target_logits=*/p.needs_forward());
  if (p.needs_forward()) {
    sum_and_draw(run, t, chunk, hidden);
    if (p.label_smoothing > 0 && p.vocab > 0) sum_weighted_logits(run, chunk, hidden);
  }
  finish_chunk(run, chunk, hidden, /*relative_to_offset=*/p.needs_forward());
  if (p.vocab == 0) return;
  if (p.needs_forward()) {
    if (!t.screen.used()) draw_again(run, t, hidden);
  } else {
    if (p.label_smoothing > 0) sum_weight(run, p.vocab, run.arena.weight_sum);
    if (!p.has.saved) {
      choose_columns(run, t);
      draw_with_lse(run, t, chunk, hidden);
    }
  }
  if (p.needs_backward()) gradients_of_draws(run, t, chunk, hidden);
}

}  // namespace logitless::cuda
