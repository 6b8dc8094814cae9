#include "cuda/plan/sizes.h"
#include "cuda/run/thinned/run.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/gemm.h"

namespace logitless::cuda {
namespace {

Condition active_rows(const Runner& run, const Chunk& chunk) {
  return {run.arena.active, row_blocks(chunk.rows)};
}

bool base_2(const Runner& run) {
  return run.traits().base_2;
}

void choose_columns(const Runner& run, const ThinArena& t) {
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

// Sums of the dense columns, in the slots.
void sum_dense(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden,
               const Operand& columns) {
  const Window window{0, t.sizes.dense};
  LogitsProduct product = logits_product(run, chunk, hidden, window, columns);
  product.transform.bias = t.dense_bias;
  product.target = nullptr;
  launch_logits(run, {product, StatsArgs{{.stats = run.arena.slots.without_options()}}});
}

void multiply_sample(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden,
                     const Operand& columns) {
  Gemm g;
  g.operand_dtype = run.dtype();
  g.allow_tf32 = run.problem.allow_tf32;
  g.m = chunk.rows;
  g.n = t.sizes.sampled;
  g.k = run.problem.hidden;
  g.a = hidden.data;
  g.a_stride = hidden.stride;
  g.b = at(columns.data, run.dtype(), t.sizes.dense * columns.stride);
  g.b_stride = columns.stride;
  g.transpose_b = true;
  g.c = t.sample_logits;
  g.c_stride = t.sizes.sampled;
  gemm(g, run.arena.gemm, static_cast<size_t>(run.detail.gemm_bytes), run.queue);
}

// Of all ranks' columns, in a group.
void merge_guesses(const Runner& run, const ThinArena& t) {
  const int64_t rows = run.problem.tokens;
  float* guesses = run.arena.gathered;
  run.queue.call([group = run.group, guesses, rows](cudaStream_t stream) {
    group->gather(guesses, rows, DType::kF32, stream);
  });
  launch_merge_guesses({.rows = rows,
                        .rank = run.group->rank,
                        .ranks = run.problem.group_size,
                        .slots = &run.arena.slots,
                        .guesses = guesses,
                        .guess = t.lists.guess,
                        .anchor = run.arena.anchor},
                       run.queue);
}

void guess_lse(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  const Problem& p = run.problem;
  if (p.vocab > 0) {  // of a rank of a group it may be 0
    const Operand columns = copy_columns(run, t, t.sizes.dense + t.sizes.sampled);
    sum_dense(run, t, chunk, hidden, columns);
    if (t.sizes.sampled > 0) multiply_sample(run, t, chunk, hidden, columns);
  }
  const bool merges = run.exchanges();
  Guess g{};
  g.rows = p.tokens;
  g.sampled = t.sizes.sampled;
  g.slots = &run.arena.slots;
  g.logits = t.sample_logits;
  g.sample = t.columns + t.sizes.dense;
  g.sample_others = t.sample_others;
  g.transform = run.transform;
  g.threshold = threshold_of(p);
  g.target = run.arena.target;
  g.target_logit = run.arena.target_logit;
  g.role = t.role;
  g.guess = merges ? run.arena.gathered + run.group->rank * p.tokens : t.lists.guess;
  g.guess_low = t.lists.guess_low;
  g.anchor = run.arena.anchor;
  g.row_threshold = t.row_threshold;
  g.count = t.lists.count;
  g.redrawn_count = t.redrawn_count;
  launch_guess(g, run.queue);
  if (merges) merge_guesses(run, t);
}

// The kernel of the first draw, over windows of the classifier. Condition: whether there are rows to draw
// from. set(product, args) completes them.
template <class Set>
void launch_draw(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden,
                 const Condition& condition, const Set& set) {
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    const Operand classifier = load_classifier(run, window, condition);
    LogitsProduct product = logits_product(run, chunk, hidden, window, classifier);
    ThinArgs args{row_sums(run, window)};
    args.anchor = run.arena.anchor;
    args.stats.weighted = nullptr;
    if (!run.problem.needs_forward() || !tracks_max(run)) args.stats.max = nullptr;
    args.draws.seed = t.lists.seed;
    args.draws.first_stream = static_cast<uint32_t>(run.problem.vocab_start);
    args.draws.role = t.role;
    args.draws.threshold = t.row_threshold;
    args.draws.guess_low = t.lists.guess_low;
    args.draws.count = t.lists.count;
    args.draws.elements = t.lists.elements;
    args.draws.capacity = static_cast<int32_t>(t.sizes.capacity);
    set(product, args);
    launch_logits(run, {product, args});
  });
}

// After the draw, what can be told before lse is known: rows whose guess was too low, and new sums of blocks
// of rows where they left the range of exps.
void find_low_guesses(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  const Arena& a = run.arena;
  FindLowGuesses f{};
  f.rows = chunk.rows;
  f.slots = &a.slots;
  f.most_expected = most_expected(run.problem.threshold);
  f.target = a.target;
  f.guess = t.lists.guess;
  f.count = t.lists.count;
  f.out_of_range = t.out_of_range;
  f.redrawn = t.redrawn;
  f.redrawn_count = t.redrawn_count;
  launch_find_low_guesses(f, run.queue);
  sum_rows(run, chunk, hidden, t.out_of_range);
  launch_anchor_redraws(a.slots, base_2(run), t.out_of_range, a.target, chunk.rows, a.anchor, run.queue);
}

// Rows with a bad guess once more, copied side by side, as many as there is room for at a time. Without any,
// the launches find nothing to do.
void draw_again(const Runner& run, const ThinArena& t, const Operand& hidden) {
  const Arena& a = run.arena;
  launch_find_high_guesses({.rows = run.problem.tokens,
                            .base_2 = base_2(run),
                            .certain_share = kCertainShare,
                            .target = a.target,
                            .lse = a.lse,
                            .lse_low = a.lse_low,
                            .guess = t.lists.guess,
                            .count = t.lists.count,
                            .redrawn = t.redrawn,
                            .redrawn_count = t.redrawn_count},
                           run.queue);
  const auto element = static_cast<int64_t>(size_of(run.dtype()));
  GatherRedraws g{};
  g.redrawn_count = t.redrawn_count;
  g.portion = t.portion;
  g.hidden = hidden.data;
  g.hidden_bytes = run.depth() * element;
  g.hidden_stride = hidden.stride * element;
  g.copy = t.portion_hidden;
  g.lse = a.lse;
  g.lse_low = a.lse_low;
  g.guess = t.lists.guess;
  g.guess_low = t.lists.guess_low;
  g.threshold = threshold_of(run.problem);
  g.inverse_temperature = a.inverse_temperature;
  g.portion_inverse_temperature = t.portion_inverse_temperature;
  g.portion_anchor = t.portion_anchor;
  g.portion_threshold = t.portion_threshold;
  for (int64_t i = 0; i < t.portions; ++i) {
    g.first = i * t.portion;
    g.redrawn = t.redrawn + g.first;
    g.count = t.redrawn_count + 1 + i;
    launch_gather_redraws(g, run.queue);
    const Chunk portion{.rows = t.portion, .row_count = g.count};
    const Operand rows{t.portion_hidden, run.depth()};
    launch_draw(run, t, portion, rows, {g.count, sizeof(int32_t)},
                [&](LogitsProduct& product, ThinArgs& args) {
                  product.row_count = g.count;
                  product.target = nullptr;
                  product.transform.inverse_temperature = t.portion_inverse_temperature;
                  args.stats = StatSlots{};  // the sums are known
                  args.anchor = t.portion_anchor;
                  args.draws.threshold = t.portion_threshold;
                  args.draws.row = g.redrawn;
                });
  }
}

}  // namespace

bool sums_while_drawing(const Runner& run) {
  return run.traits().sums_while_drawing;
}

Operand copy_columns(const Runner& run, const ThinArena& t, int64_t count) {
  RowsCopy c{};
  c.from = run.buffers.classifier;
  c.from_dtype = run.problem.dtype.classifier;
  c.from_stride = run.buffers.classifier_stride;
  c.row_map = c.target = t.columns;
  c.to = t.columns_copy;
  c.to_dtype = run.dtype();
  c.to_stride = run.depth();
  c.rows = count;
  c.columns = run.problem.hidden;
  c.padded = run.depth();
  launch_copy_rows(c, run.queue);
  if (t.dense_bias != nullptr) {
    launch_gather_vector(run.transform.bias, t.columns, t.sizes.dense, t.dense_bias, run.queue);
  }
  return {t.columns_copy, run.depth()};
}

void sum_classifier(const Runner& run, const ThinArena& t, const Operand& hidden) {
  const Problem& p = run.problem;
  const float* weight = run.rows.class_weight != nullptr ? run.rows.class_weight + p.vocab_start : nullptr;
  launch_weighted_rows({.data = run.buffers.classifier,
                        .dtype = p.dtype.classifier,
                        .stride = run.buffers.classifier_stride,
                        .operand_dtype = run.dtype(),
                        .rows = p.vocab,
                        .columns = p.hidden,
                        .weight = weight,
                        .parts = t.sum_parts,
                        .sum = t.classifier_sum},
                       run.queue);
  if (!p.needs_forward() || !sums_while_drawing(run)) return;
  const StatSlots& slots = run.arena.slots;
  run.queue.clear(slots.weighted, static_cast<size_t>(slots.slots * slots.stride) * sizeof(float));
  WeightedLogits w{};
  w.hidden = hidden.data;
  w.hidden_dtype = run.dtype();
  w.hidden_stride = hidden.stride;
  w.rows = p.tokens;
  w.columns = p.hidden;
  w.classifier_sum = t.classifier_sum;
  w.transform = run.transform;
  w.bias_sum = t.sum_parts;
  w.class_weight = weight;
  w.vocab = p.vocab;
  w.target = run.arena.target;
  w.weighted = run.arena.slots.weighted;
  launch_weighted_logits(w, run.queue);
}

namespace {

// The sums are known: lse is the guess.
void draw_with_lse(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  const Arena& a = run.arena;
  KnownGuess g{};
  g.rows = chunk.rows;
  g.lse = a.lse;
  g.lse_low = a.lse_low;
  g.target = a.target;
  g.threshold = threshold_of(run.problem);
  g.guess = t.lists.guess;
  g.guess_low = t.lists.guess_low;
  g.anchor = a.anchor;
  g.row_threshold = t.row_threshold;
  g.count = t.lists.count;
  launch_known_guess(g, run.queue);
  launch_draw(run, t, chunk, hidden, active_rows(run, chunk), [&](LogitsProduct& product, ThinArgs& args) {
    product.row_block_active = a.active;
    args.stats = StatSlots{};
  });
}

}  // namespace

void sum_and_draw(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  if (run.problem.vocab > 0) choose_columns(run, t);
  if (!sums_while_drawing(run)) return sum_rows(run, chunk, hidden, run.arena.active);
  guess_lse(run, t, chunk, hidden);
  launch_draw(run, t, chunk, hidden, active_rows(run, chunk), [&](LogitsProduct& product, ThinArgs& args) {
    product.row_block_active = run.arena.active;
    args.draws.certain_share = kCertainShare;
  });
  find_low_guesses(run, t, chunk, hidden);
}

void finish_draw(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  if (sums_while_drawing(run)) {
    draw_again(run, t, hidden);
  } else {
    draw_with_lse(run, t, chunk, hidden);
  }
}

void draw_of_known_sums(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden) {
  choose_columns(run, t);
  draw_with_lse(run, t, chunk, hidden);
}

}  // namespace logitless::cuda
