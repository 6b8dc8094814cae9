#include "cuda/check.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/sizes.h"
#include "cuda/sm90/anchor.h"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;

__device__ void put(void* data, int64_t row, double value) {
  if (data != nullptr) static_cast<float*>(data)[row] = static_cast<float>(value);
}

__global__ void fill_ignored_kernel(RowInputs in, Buffers out) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.tokens) return;
  const int64_t target = target_of(in, row);
  const bool ignored = target == in.ignore_index;
  if (!ignored && in_range(in, target)) return;
  const double value = ignored ? 0 : CUDART_NAN;
  put(out.max, row, -CUDART_INF);
  put(out.sum_exp, row, 0);
  put(out.target_logit, row, value);
  put(out.sum_exp_logit, row, 0);
  put(out.weighted_logit_sum, row, 0);
  put(out.nll, row, value);
  put(out.lse, row, value);
  put(out.lse_low, row, 0);
  put(out.entropy, row, value);
  if (in.is_none) put(out.loss, row, value);
  if (out.argmax != nullptr) out.argmax[row] = -1;
}

// Of a gradient that every column has a part in.
__global__ void exact_draw_stats_kernel(RowInputs in, int32_t columns, int32_t* kept_count, float* variance) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.tokens) return;
  const int64_t target = target_of(in, row);
  const bool computed = target != in.ignore_index && in_range(in, target);
  if (kept_count != nullptr) kept_count[row] = computed ? columns : 0;
  if (variance != nullptr) variance[row] = 0;
}

__global__ void init_slots_kernel(StatSlots slots, const uint8_t* active) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= slots.slots * slots.stride) return;
  if (active != nullptr && active[i % slots.stride / kRowBlock] == 0) return;
  slots.max[i] = -CUDART_INF_F;
  slots.sum[i] = 0;
  if (slots.sum_offset != nullptr) slots.sum_offset[i] = 0;
  if (slots.weighted != nullptr) slots.weighted[i] = 0;
  if (slots.argmax != nullptr) slots.argmax[i] = -1;
  if (slots.expected != nullptr) slots.expected[i] = 0;
}

__global__ void finish_rows_kernel(RowInputs in, Arena arena, Buffers out, FinishRows f) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= existing(f.row_count, f.rows)) return;
  const int32_t local = arena.target[f.first + r];
  if (local == kIgnoredRow) {
    arena.row_loss[f.first + r] = 0;
    return;
  }
  const int64_t row = arena.row_map[f.first + r];
  const int64_t target = target_of(in, row);
  RowStats<double> stats;
  if (f.anchored) {
    const float anchor = arena.anchor[r];
    stats = joined_to_anchor(arena.slots, r, f.base_2 ? sm90::effective_anchor(anchor) : double{anchor});
  } else {
    stats = joined(arena.slots, r);
  }
  stats.target_logit = local >= 0 ? double{arena.target_logit[r]} : 0;
  if (stats.argmax >= 0) stats.argmax += in.vocab_start;
  RowStats<double> shown = stats;
  if (f.anchored && f.has_max) shown = rebase(stats, joined_max(arena.slots, r));
  put(out.max, row, shown.max);
  put(out.sum_exp, row, shown.sum_exp);
  put(out.target_logit, row, stats.target_logit);
  put(out.sum_exp_logit, row, shown.sum_exp_logit);
  put(out.weighted_logit_sum, row, stats.weighted_logit_sum);
  if (out.argmax != nullptr) out.argmax[row] = stats.argmax;
  if (f.is_shard) return;
  const RowLoss<double> loss = row_loss(loss_params(in, *arena.scalars), weights_of(in, row, target), stats);
  const FloatPair lse = split_to_floats(log_sum_exp_parts(stats));
  arena.lse[r] = lse.high;
  arena.lse_low[r] = lse.low;
  if (f.anchored) arena.row_factor[r] = static_cast<float>(stats.sum_exp);
  arena.row_loss[f.first + r] = static_cast<float>(loss.loss);
  put(out.nll, row, loss.nll);
  put(out.lse, row, lse.high);
  put(out.lse_low, row, lse.low);
  put(out.entropy, row, loss.entropy);
  if (in.is_none) put(out.loss, row, loss.loss);
  if (out.correct_count != nullptr && stats.argmax == target) atomicAdd(&arena.scalars->correct_count, 1ull);
}

__global__ void __launch_bounds__(1024) finish_loss_kernel(RowInputs in, Arena arena, Buffers out) {
  double sum = 0;
  const Scalars& s = *arena.scalars;
  for (int64_t r = threadIdx.x; r < s.row_count; r += 1024) sum += arena.row_loss[r];
  sum = block_sum<1024>(sum);
  if (threadIdx.x != 0) return;
  if (!in.is_none) put(out.loss, 0, s.invalid_count > 0 ? CUDART_NAN : sum / s.divisor);
  if (out.correct_count != nullptr) *out.correct_count = static_cast<int64_t>(s.correct_count);
}

// Range of a row's sum of exps relative to its anchor. Up: fp32 holds the exps, and sums of exp (z - anchor)
// for differences up to 2^27; bf16 products of what is stored (times 2^kKeptExponent) keep 2^60 for their
// other operand. Down: an exp of 2^-40 of the sum is stored as a normal number.
constexpr double kLeastSum = 0x1p-28, kMostSum = 0x1p125, kMostSumWithOffsets = 0x1p100;
static_assert(-28 - 40 + sm90::kKeptExponent == -126);

// One block of threads for each block of rows.
__global__ void __launch_bounds__(kRowBlock)
    find_redo_kernel(Arena arena, int64_t rows, const int32_t* row_count) {
  const int64_t r = int64_t{blockIdx.x} * kRowBlock + threadIdx.x;
  bool redo = false;
  if (r < existing(row_count, rows)) {
    const StatSlots& slots = arena.slots;
    const double sum = sum_of_slots(slots, slots.sum, r);
    const double most = slots.sum_offset == nullptr ? kMostSum : kMostSumWithOffsets;
    redo = !(sum < most && sum > kLeastSum);  // also NaN: the anchor itself may be -inf
  }
  redo = __syncthreads_or(redo);
  if (threadIdx.x == 0) arena.active[blockIdx.x] = redo;
}

__global__ void anchor_from_slots_kernel(Arena arena, int64_t rows, const int32_t* row_count) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= existing(row_count, rows) || arena.active[r / kRowBlock] == 0) return;
  const FloatPair lse = split_to_floats(log_sum_exp_parts(joined(arena.slots, r)));
  arena.anchor[r] = lse.high;
  arena.lse_low[r] = lse.low;
}

}  // namespace

void launch_fill_ignored(const RowInputs& in, const Buffers& out, cudaStream_t stream) {
  fill_ignored_kernel<<<blocks_for(in.tokens, kThreads), kThreads, 0, stream>>>(in, out);
  check_launch("fill_ignored");
}

void launch_exact_draw_stats(const RowInputs& in, int64_t columns, const Buffers& out, cudaStream_t stream) {
  exact_draw_stats_kernel<<<blocks_for(in.tokens, kThreads), kThreads, 0, stream>>>(
      in, static_cast<int32_t>(columns), out.kept_count, static_cast<float*>(out.draw_variance));
  check_launch("exact_draw_stats");
}

void launch_init_slots(const StatSlots& slots, const uint8_t* active, cudaStream_t stream) {
  init_slots_kernel<<<blocks_for(slots.slots * slots.stride, kThreads), kThreads, 0, stream>>>(slots, active);
  check_launch("init_slots");
}

void launch_finish_rows(const RowInputs& in, const Arena& arena, const Buffers& out, const FinishRows& f,
                        cudaStream_t stream) {
  finish_rows_kernel<<<blocks_for(f.rows, kThreads), kThreads, 0, stream>>>(in, arena, out, f);
  check_launch("finish_rows");
}

void launch_finish_loss(const RowInputs& in, const Arena& arena, const Buffers& out, cudaStream_t stream) {
  finish_loss_kernel<<<1, 1024, 0, stream>>>(in, arena, out);
  check_launch("finish_loss");
}

void launch_find_redo(const Arena& arena, int64_t rows, const int32_t* row_count, cudaStream_t stream) {
  find_redo_kernel<<<static_cast<unsigned>(row_blocks(rows)), kRowBlock, 0, stream>>>(arena, rows, row_count);
  check_launch("find_redo");
}

void launch_anchor_from_slots(const Arena& arena, int64_t rows, const int32_t* row_count,
                              cudaStream_t stream) {
  anchor_from_slots_kernel<<<blocks_for(rows, kThreads), kThreads, 0, stream>>>(arena, rows, row_count);
  check_launch("anchor_from_slots");
}

}  // namespace headroom::cuda
