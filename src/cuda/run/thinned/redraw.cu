#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/rows/anchor.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/run/thinned/thinned.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kGatherBlocks = 512;

__device__ void list_redraw(int64_t row, int32_t* count, int32_t* redrawn, int32_t* redrawn_count) {
  count[row] = 0;
  redrawn[atomicAdd(redrawn_count, 1)] = static_cast<int32_t>(row);
}

// One block of threads for each block of rows.
__global__ void __launch_bounds__(kRowBlock) find_low_guesses_kernel(FindLowGuesses f, StatSlots slots) {
  const int64_t row = int64_t{blockIdx.x} * kRowBlock + threadIdx.x;
  bool out = false;
  if (row < f.rows && f.target[row] != kIgnoredRow) {
    const double sum = sum_of_slots(slots, slots.sum, row);
    const double expected = sum_of_slots(slots, slots.expected, row);
    const SumRange range = range_of_sums(slots, kGuessedRange);
    out = !(sum < range.most && sum > range.least);
    if (out || expected > f.most_expected) {
      f.guess[row] = -CUDART_INF_F;  // no longer too high
      list_redraw(row, f.count, f.redrawn, f.redrawn_count);
    }
  }
  out = __syncthreads_or(out);
  if (threadIdx.x == 0) f.out_of_range[blockIdx.x] = out;
  if (out && row < f.rows) clear_row(slots, row);
}

__global__ void find_high_guesses_kernel(FindHighGuesses f) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= f.rows || f.target[row] == kIgnoredRow) return;
  const double guess = f.base_2 ? effective_anchor(f.guess[row]) : double{f.guess[row]};
  const double lse = double{f.lse[row]} + double{f.lse_low[row]};
  if (lse - guess < log(1.001 * f.certain_share)) list_redraw(row, f.count, f.redrawn, f.redrawn_count);
}

__global__ void anchor_redraws_kernel(StatSlots slots, bool base_2, const uint8_t* out_of_range,
                                      const int32_t* target, int64_t rows, float* anchor) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= rows || out_of_range[row / kRowBlock] == 0 || target[row] == kIgnoredRow) return;
  const float lse = split_to<float>(log_sum_exp_parts(joined(slots, row))).high;
  anchor[row] = lse == -CUDART_INF_F ? 0 : lse;  // of masked columns alone: their sums stay 0
  const double effective = base_2 ? effective_anchor(anchor[row]) : double{anchor[row]};
  for (int64_t s = 0; s < slots.slots; ++s) {
    const int64_t at = s * slots.stride + row;
    const double factor = exp(slots.max[at] - effective);
    const double sum = slots.sum[at] * factor;
    slots.sum[at] = static_cast<float>(sum);
    const double shift = slots.max[at] - effective;
#define LOGITLESS_REBASE(name, part, kind, ...)                                        \
  if (slots.part != nullptr) {                                                         \
    const double rebased = rebased_sum<double>(SumKind::kind, slots.part[at], factor); \
    const double mass = SumKind::kind == SumKind::kExpOffset ? sum : 0;                \
    slots.part[at] = static_cast<float>(moved_sum(rebased, mass, shift));              \
  }
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_REBASE)
#undef LOGITLESS_REBASE
  }
}

// By a whole block, row i of the portion.
__device__ void gather_redraw(const GatherRedraws& g, int64_t i) {
  const int64_t row = g.redrawn[i];
  const auto* from =
      reinterpret_cast<const uint4*>(static_cast<const char*>(g.hidden) + row * g.hidden_stride);
  auto* to = reinterpret_cast<uint4*>(static_cast<char*>(g.copy) + i * g.hidden_bytes);
  for (int64_t k = threadIdx.x; k < g.hidden_bytes / 16; k += kThreads) to[k] = from[k];
  if (threadIdx.x != 0) return;
  g.guess[row] = g.portion_anchor[i] = g.lse[row];
  g.guess_low[row] = g.lse_low[row];
  g.portion_threshold[i] = g.threshold;
  if (g.inverse_temperature != nullptr) g.portion_inverse_temperature[i] = g.inverse_temperature[row];
}

// There are seldom any rows, so blocks are few.
__global__ void gather_redraws_kernel(GatherRedraws g) {
  const int64_t count = max(int64_t{0}, min(*g.redrawn_count - g.first, g.portion));
  if (blockIdx.x == 0 && threadIdx.x == 0) *g.count = static_cast<int32_t>(count);
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) gather_redraw(g, i);
}

}  // namespace

void launch_find_low_guesses(const FindLowGuesses& f, const Queue& queue) {
  queue.launch(find_low_guesses_kernel, static_cast<unsigned>(row_blocks(f.rows)), kRowBlock, 0, f, *f.slots);
  check_launch("find_low_guesses");
}

void launch_find_high_guesses(const FindHighGuesses& f, const Queue& queue) {
  queue.launch(find_high_guesses_kernel, blocks_for(f.rows, kThreads), kThreads, 0, f);
  check_launch("find_high_guesses");
}

void launch_anchor_redraws(const StatSlots& slots, bool base_2, const uint8_t* out_of_range,
                           const int32_t* target, int64_t rows, float* anchor, const Queue& queue) {
  queue.launch(anchor_redraws_kernel, blocks_for(rows, kThreads), kThreads, 0, slots, base_2, out_of_range,
               target, rows, anchor);
  check_launch("anchor_redraws");
}

void launch_gather_redraws(const GatherRedraws& g, const Queue& queue) {
  queue.launch(gather_redraws_kernel, static_cast<unsigned>(std::min(g.portion, kGatherBlocks)), kThreads, 0,
               g);
  check_launch("gather_redraws");
}

}  // namespace logitless::cuda
