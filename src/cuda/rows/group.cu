#include "core/group_cut.h"
#include "cuda/rows/finish_row.cuh"

namespace logitless::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// The statistics that are sent to other ranks. They are relative to a float: the maximum, or the offset of
// the sums. Without any exp they are relative to nothing.
__device__ RowStats<double> exchanged(const RowStats<double>& stats, const FinishRows& f, double largest) {
  if (stats.sum_exp == 0) {
    RowStats<double> none;
#define LOGITLESS_KEEP(name, part, kind, ...) \
  if (SumKind::kind == SumKind::kPlain || SumKind::kind == SumKind::kOffset) none.part = stats.part;
    LOGITLESS_ROW_SUMS(LOGITLESS_KEEP)
#undef LOGITLESS_KEEP
    none.argmax = stats.argmax;
    return none;
  }
  return rebase(stats, double{static_cast<float>(f.relative_to_offset && f.has_max ? largest : stats.max)});
}

// One warp for each row of the chunk. Rows that do not exist or are ignored have the statistics of no column.
__global__ void __launch_bounds__(kThreads)
    group_stats_kernel(RowInputs in, Arena arena, FinishChunk f, GroupStats mine) {
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
    stats = exchanged(stats, f.stats, largest);
  }
  for (int64_t i = lane; i < in.top_k; i += 32) {
    // An empty shard has no entries, and neither have rows that are not computed.
    const TopEntry<float> entry = arena.top.best[r * in.top_k + i];
    const bool is_one = is_computed && entry.column >= 0 && entry.column < in.vocab;
    mine.top_logit[i * f.rows + r] = is_one ? entry.z : 0;
    mine.top_id[i * f.rows + r] = is_one ? static_cast<int32_t>(in.vocab_start + entry.column) : -1;
  }
  if (lane != 0) return;
  store_partial(mine.partials, r, stats);
  mine.target_logit[r] = static_cast<float>(stats.target_logit);
  if (mine.partials.argmax != nullptr) mine.partials.argmax[r] = static_cast<int32_t>(stats.argmax);
}

constexpr int kCutThreads = 1024;

__device__ void store_wide(uint32_t* at, uint64_t value) {
  at[0] = static_cast<uint32_t>(value);
  at[1] = static_cast<uint32_t>(value >> 32);
}

__device__ uint64_t wide_at(const uint32_t* at) {
  return at[0] | uint64_t{at[1]} << 32;
}

__global__ void __launch_bounds__(kCutThreads) group_cut_kernel(RowTargets in, uint32_t* cut) {
  const int64_t targets = in.tokens * (in.targets_per_row > 0 ? in.targets_per_row : 1);
  unsigned long long sum = 0;
  for (int64_t i = threadIdx.x; i < targets; i += kCutThreads) sum += mixed_target(target_at(in, i), i);
  sum = block_sum<kCutThreads>(sum);
  if (threadIdx.x != 0) return;
  store_wide(cut, mixed_columns(in.vocab_start, in.vocab_start + in.vocab));
  // The digest includes which rows are ignored: ranks that differ in this have losses of different rows.
  const uint64_t ignored =
      mixed_target(in.ignore_index, in.shift) + (in.shift != 0 ? mixed_target(in.sequence_length, 0) : 0);
  store_wide(cut + 2, mixed(sum + ignored) + static_cast<uint64_t>(in.vocab_total));
}

__device__ bool make_a_vocabulary(const RowTargets& in, const GroupStats& all) {
  uint64_t columns = 0;
  bool is_same = true;
  for (int64_t s = 0; s < all.partials.partials; ++s) {
    const uint32_t* cut = all.cut + s * all.partials.stride;
    columns += wide_at(cut);
    is_same = is_same && wide_at(cut + 2) == wide_at(all.cut + 2);
  }
  return is_same && columns == mixed_columns(0, in.vocab_total);
}

__global__ void __launch_bounds__(kCutThreads)
    check_cuts_kernel(RowTargets in, Arena arena, GroupStats all, bool is_first, int64_t rows) {
  const bool is_right = is_first ? make_a_vocabulary(in, all) : !isnan(arena.scalars->divisor);
  if (is_right) return;
  for (int64_t r = threadIdx.x; r < rows; r += kCutThreads) {
    all.partials.max[r] = all.partials.sum[r] = CUDART_NAN_F;
  }
  if (threadIdx.x == 0 && is_first) arena.scalars->divisor = CUDART_NAN;
}

}  // namespace

void launch_group_cut(const RowTargets& in, const GroupStats& mine, const Queue& queue) {
  queue.launch("group_cut", group_cut_kernel, 1, kCutThreads, 0, in, mine.cut);
}

void launch_check_cuts(const RowTargets& in, const Arena& arena, const GroupStats& all, bool is_first,
                       int64_t rows, const Queue& queue) {
  queue.launch("check_cuts", check_cuts_kernel, 1, kCutThreads, 0, in, arena, all, is_first, rows);
}

void launch_group_stats(const RowInputs& in, const Arena& arena, const FinishChunk& f, const GroupStats& mine,
                        const Queue& queue) {
  queue.launch("group_stats", group_stats_kernel, blocks_for(f.rows, kWarps), kThreads, 0, in, arena, f,
               mine);
}

}  // namespace logitless::cuda
