#include <algorithm>

#include "cpu/thinned/thinned.h"

namespace logitless::cpu {
namespace {

void run_chunk(const Runner& run, const HostLoss& loss, HostLossWriter& writer, const Chunk& chunk) {
  const Problem& p = run.problem;
  if (draws_elements(p)) {
    TaskGroups groups(run.arena.groups);
    const ForwardStage forward(run, chunk, groups, load_chunk(run, chunk, groups).rows);
    groups.run(run.pool, run.schedule.threads);
  }
  if (run.joins_group()) {
    join_group(run, chunk);
    run.loop(chunk.row_tasks(), [&](int64_t task, int) { settle_draws(run, chunk, chunk.rows(task)); });
  }
  if (p.needs_forward()) write_losses(run, chunk, writer);
  if (p.needs_backward()) finish_rows(run, loss, chunk);
}

}  // namespace

void run_thinned(const Runner& run, const HostLoss& loss) {
  const Problem& p = run.problem;
  const ThinnedArena& t = run.arena.thinned;
  if (draws_elements(p) && p.tokens > 0) t.draws.seed[0] = seed_of(p, run.buffers);
  std::fill(t.column_count.begin(), t.column_count.end(), 0);
  if (p.needs_backward()) {
    write_undrawn_defaults(p, run.buffers);
    if (p.label_smoothing > 0 && p.has.d_hidden) sum_classifier(run);
  }
  HostLossWriter writer(loss);
  for_chunks(run, [&](const Chunk& chunk) { run_chunk(run, loss, writer, chunk); });
  if (p.needs_forward()) writer.finish();
  if (!p.has.d_classifier && !p.has.d_bias) return;
  if (p.label_smoothing > 0 && p.has.d_classifier) sum_hidden(run);
  finish_columns(run);
}

}  // namespace logitless::cpu
