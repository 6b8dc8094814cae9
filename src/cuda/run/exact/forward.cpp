#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/run/exact/run.h"

namespace logitless::cuda {
namespace {

void keep_exps_of(const Runner& run, const Chunk& chunk, const Operand& hidden, const uint8_t* active) {
  for_windows(0, run.problem.vocab, widest_window(run), [&](const Window& window) {
    const Operand classifier = load_classifier(run, window, {active, row_blocks(chunk.rows)});
    LogitsProduct product = logits_product(run, chunk, hidden, window, classifier);
    product.row_block_active = active;
    ExpsArgs args{row_sums(run, window)};
    if (run.detail.anchored && !tracks_max(run)) args.stats.max = nullptr;
    if (run.traits().anchors_first) {
      args.anchor = run.arena.anchor;
    } else {
      args.found_anchor = run.arena.anchor;
    }
    const int64_t kept = std::clamp<int64_t>(run.detail.kept_columns - window.first, 0, window.columns);
    args.exps = {.data = at(run.arena.exps, run.dtype(), kept > 0 ? window.first : 0),
                 .columns = kept,
                 .stride = exps_stride(run.problem, run.detail)};
    launch_logits(run, {product, args});
  });
}

bool may_be_done_again(const Runner& run) {
  const Problem& p = run.problem;
  if (!run.traits().anchors_first) return false;
  // Of a shard the anchors may be 0.
  return p.is_shard() || p.softcap == 0 || p.has.temperature ||
         may_leave_range(2 * p.softcap, p.vocab, run.arena.slots);
}

}  // namespace

// Where anchors come first, they are the target's logit, which is nearly always within 86 nats of lse. Blocks
// with a row where it is not are done again, with lse as that row's anchor; nobody has to wait to know
// whether there are any.
void keep_exps(const Runner& run, const Chunk& chunk, const Operand& hidden, const uint8_t* active) {
  keep_exps_of(run, chunk, hidden, active);
  if (!may_be_done_again(run)) return;
  const Arena& a = run.arena;
  launch_find_redo(a, chunk.rows, chunk.row_count, a.target + chunk.first, run.queue);
  sum_rows(run, chunk, hidden, a.active);
  launch_anchor_from_slots(a, chunk.rows, chunk.row_count, /*again=*/true, run.queue, run.problem.in_group());
  keep_exps_of(run, chunk, hidden, a.active);
}

}  // namespace logitless::cuda
