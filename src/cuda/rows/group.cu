#include "cuda/check.h"
#include "cuda/launch.cuh"
#include "cuda/rows/finish_row.cuh"

namespace headroom::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// Relative to a float: the maximum, or what the sums were relative to; or of no exp at all.
__device__ RowStats<double> told(const RowStats<double>& stats, const FinishRows& f, double largest) {
  if (stats.sum_exp == 0) {
    RowStats<double> none;
#define HEADROOM_KEEP(name, part, kind, ...) \
  if (SumKind::kind == SumKind::kPlain || SumKind::kind == SumKind::kOffset) none.part = stats.part;
    HEADROOM_ROW_SUMS(HEADROOM_KEEP)
#undef HEADROOM_KEEP
    none.argmax = stats.argmax;
    return none;
  }
  return rebase(stats, double{static_cast<float>(f.anchored && f.has_max ? largest : stats.max)});
}

// One warp a row of the chunk. Rows that do not exist, or are ignored, are those of no column.
__global__ void __launch_bounds__(kThreads)
    group_stats_kernel(RowInputs in, Arena arena, FinishChunk f, GroupStats mine) {
  wait_for_kernels_before();
  let_next_come_up();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r >= f.rows) return;
  RowStats<double> stats;
  const bool is_computed = r < existing(f.row_count, f.rows) && arena.target[f.first + r] != kIgnoredRow;
  if (is_computed) {
    double largest = 0;
    stats = stats_of_row(in, arena, f.stats, r, arena.target[f.first + r], &largest, lane);
    const double target_logits = sum_of_targets(in, arena, r, arena.row_map[f.first + r], lane);
    if (in.targets_per_row > 0) stats.target_logit = target_logits;
    stats = told(stats, f.stats, largest);
  }
  for (int64_t i = lane; i < in.top_k; i += 32) {
    // Of an empty shard nothing has been found, nor of rows that are not computed.
    const TopEntry<float> entry = arena.top.best[r * in.top_k + i];
    const bool is_one = is_computed && entry.column >= 0 && entry.column < in.vocab;
    mine.top_logit[i * f.rows + r] = is_one ? entry.z : 0;
    mine.top_id[i * f.rows + r] = is_one ? static_cast<int32_t>(in.vocab_start + entry.column) : -1;
  }
  if (lane != 0) return;
  put_slot(mine.slots, r, stats);
  mine.target_logit[r] = static_cast<float>(stats.target_logit);
  if (mine.slots.argmax != nullptr) mine.slots.argmax[r] = static_cast<int32_t>(stats.argmax);
}

}  // namespace

void launch_group_stats(const RowInputs& in, const Arena& arena, const FinishChunk& f, const GroupStats& mine,
                        After after, const Queue& queue) {
  launch_after(after, "group_stats", group_stats_kernel, blocks_for(f.rows, kWarps), kThreads, queue, in,
               arena, f, mine);
}

}  // namespace headroom::cuda
