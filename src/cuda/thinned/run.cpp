#include "cuda/thinned/run.h"

namespace headroom::cuda {

void run_thinned(const Runner& run, Workspace workspace) {
  const Problem& p = run.problem;
  if (p.tokens == 0) return;
  const ThinArena t = lay_out_thinned(p, run.plan, workspace, run.buffers.draws);
  const Chunk chunk{true, 0, p.tokens, run.arena.chunk_rows};
  const Operand hidden = load_hidden(run, chunk);
  if (p.needs_forward()) {
    draw(run, t, chunk, hidden);
    if (p.label_smoothing > 0) sum_classifier(run, t, hidden);  // after the slots were last set
    launch_finish_rows(run.rows, run.arena, run.buffers,
                       {chunk.first, chunk.rows, chunk.row_count, sums_while_drawing(run), tracks_max(run),
                        run.detail.implementation == Implementation::kSm90, p.is_shard()},
                       run.stream);
  }
  if (!p.needs_backward()) return;
  load_coefficients(run, chunk);
  if (!p.needs_forward() && p.label_smoothing > 0) sum_classifier(run, t, hidden);
  if (!p.needs_forward() && !p.keeps_draws) draw(run, t, chunk, hidden);
  gradients_of_draws(run, t, chunk, hidden);
}

}  // namespace headroom::cuda
