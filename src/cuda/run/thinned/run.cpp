#include "cuda/run/thinned/run.h"

namespace logitless::cuda {

void run_thinned(const Runner& run, const ThinArena& t) {
  const Problem& p = run.problem;
  if (p.tokens == 0) return;
  const Chunk chunk{.rows = p.tokens, .row_count = run.arena.chunk_rows};
  const bool sums_to_guess = p.needs_forward() && sums_while_drawing(run);
  const Operand hidden = load_rows(run, chunk, /*wants_target_logits=*/sums_to_guess);  // for the guess
  if (p.needs_forward()) {
    sum_and_draw(run, t, chunk, hidden);
    // After the slots were last set.
    if (p.label_smoothing > 0 && p.vocab > 0) sum_classifier(run, t, hidden);
  }
  finish_chunk(run, chunk, hidden, sums_to_guess);
  if (p.vocab == 0) return;
  if (p.needs_forward()) {
    finish_draw(run, t, chunk, hidden);
  } else {
    if (p.label_smoothing > 0) sum_classifier(run, t, hidden);
    if (!p.has.draws) draw_of_known_sums(run, t, chunk, hidden);
  }
  if (p.needs_backward()) gradients_of_draws(run, t, chunk, hidden);
}

}  // namespace logitless::cuda
