#include "cuda/thinned/thinned_run.h"

namespace headroom::cuda {

void run_thinned(const Runner& run, const ThinArena& t) {
  const Problem& p = run.problem;
  if (p.tokens == 0) return;
  const Chunk chunk{.rows = p.tokens, .row_count = run.arena.chunk_rows};
  const bool sums_to_guess = p.needs_forward() && sums_while_drawing(run);
  const Operand hidden = load_rows(run, chunk, /*wants_target_logits=*/sums_to_guess);  // for the guess
  if (p.needs_forward()) {
    draw(run, t, chunk, hidden);
    if (p.label_smoothing > 0) sum_classifier(run, t, hidden);  // after the slots were last set
  }
  finish_chunk(run, chunk, hidden, sums_to_guess);
  if (!p.needs_backward()) return;
  if (!p.needs_forward() && p.label_smoothing > 0) sum_classifier(run, t, hidden);
  if (!p.needs_forward() && !p.keeps_draws) draw(run, t, chunk, hidden);
  gradients_of_draws(run, t, chunk, hidden);
}

}  // namespace headroom::cuda
