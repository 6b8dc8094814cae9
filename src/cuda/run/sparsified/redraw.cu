#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/logit_offset.h"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kGatherBlocks = 512;
constexpr double kMostDenseShare = 256;  // of the screen's sums over dense columns in the corrected sum

__device__ void list_redraw(const SparsifiedArena& t, int64_t row) {
  t.lists.count[row] = 0;
  t.redrawn[atomicAdd(t.redrawn_count, 1)] = static_cast<int32_t>(row);
}

// One block of threads for each block of rows.
__global__ void __launch_bounds__(kRowBlock)
    find_bad_estimates_kernel(SparsifiedArena t, double most, double least_sum, bool seldom_differs) {
  const PartialStats& partials = t.base.partials;
  const int64_t row = int64_t{blockIdx.x} * kRowBlock + threadIdx.x;
  const bool exists = row < t.rows && t.base.target[row] != kIgnoredRow;
  bool out = false, again = false, is_large = false;
  if (exists) {
    const double sum = sum_of_partials(partials, partials.sum, row);
    const double expected = sum_of_partials(partials, partials.expected, row);
    const SumRange range = range_of_sums(partials, kEstimatedRange);
    out = !(sum < range.most && sum > range.least);
    is_large = seldom_differs && !(fabsf(t.lists.lse_estimate[row]) < kLargeLogit);
    again = out || expected > most || ((is_large || t.screen.used()) && sum < least_sum);
    // Sums of dense columns that were far larger have left no digits.
    if (t.screen.used()) again = again || t.screen.dense_sum[row] > kMostDenseShare * sum;
  }
  if (t.screen.used() && __syncthreads_or(again)) out = again = true;
  if (seldom_differs && __syncthreads_or(again && is_large)) out = again = true;
  if (exists && again) {
    t.lists.lse_estimate[row] = -CUDART_INF_F;  // no longer too high
    list_redraw(t, row);
  }
  out = __syncthreads_or(out);
  if (threadIdx.x == 0) t.lists.summed_again[blockIdx.x] = out;
  if (out && row < t.rows) clear_row(partials, row);
}

__global__ void find_high_estimates_kernel(SparsifiedArena t, bool base_2) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= t.rows || t.base.target[row] == kIgnoredRow) return;
  const double lse_estimate =
      base_2 ? rounded_offset(t.lists.lse_estimate[row]) : double{t.lists.lse_estimate[row]};
  const double lse = double{t.base.lse[row]} + double{t.base.lse_residual[row]};
  if (lse - lse_estimate < log(kLeastSum)) list_redraw(t, row);
}

__global__ void offset_redraws_kernel(SparsifiedArena t, bool base_2) {
  const PartialStats& partials = t.base.partials;
  float* logit_offset = t.base.logit_offset;
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= t.rows || t.lists.summed_again[row / kRowBlock] == 0 || t.base.target[row] == kIgnoredRow)
    return;
  const float lse = split_to<float>(log_sum_exp_parts(joined(partials, row))).high;
  logit_offset[row] = lse == -CUDART_INF_F ? 0 : lse;  // masked columns only: their sums stay 0
  const double effective = base_2 ? rounded_offset(logit_offset[row]) : double{logit_offset[row]};
  for (int64_t s = 0; s < partials.partials; ++s) {
    const int64_t at = s * partials.stride + row;
    const double factor = exp(partials.max[at] - effective);
    const double sum = partials.sum[at] * factor;
    partials.sum[at] = static_cast<float>(sum);
    const double shift = partials.max[at] - effective;
#define LOGITLESS_REBASE(name, part, kind, ...)                                           \
  if (partials.part != nullptr) {                                                         \
    const double rebased = rebased_sum<double>(SumKind::kind, partials.part[at], factor); \
    const double mass = SumKind::kind == SumKind::kExpOffset ? sum : 0;                   \
    partials.part[at] = static_cast<float>(moved_sum(rebased, mass, shift));              \
  }
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_REBASE)
#undef LOGITLESS_REBASE
  }
}

// There are seldom any rows, so blocks are few; each copies whole rows. stride: of hidden, in bytes like
// row_bytes.
__global__ void gather_redraws_kernel(SparsifiedArena t, int64_t portion, const char* hidden, int64_t stride,
                                      int64_t row_bytes) {
  const int64_t first = portion * t.portion;
  const int64_t count = max(int64_t{0}, min(*t.redrawn_count - first, t.portion));
  if (blockIdx.x == 0 && threadIdx.x == 0) t.redrawn_count[1 + portion] = static_cast<int32_t>(count);
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t row = t.redrawn[first + i];
    const auto* from = reinterpret_cast<const uint4*>(hidden + row * stride);
    auto* to = reinterpret_cast<uint4*>(static_cast<char*>(t.portion_hidden) + i * row_bytes);
    for (int64_t k = threadIdx.x; k < row_bytes / 16; k += kThreads) to[k] = from[k];
    if (threadIdx.x != 0) continue;
    t.lists.lse_estimate[row] = t.portion_offset[i] = t.base.lse[row];
    t.lists.lse_estimate_residual[row] = t.base.lse_residual[row];
    t.portion_threshold[i] = t.threshold;
    if (t.portion_inverse_temperature != nullptr) {
      t.portion_inverse_temperature[i] = t.base.inverse_temperature[row];
    }
  }
}

}  // namespace

void launch_find_bad_estimates(const SparsifiedArena& t, double most_expected, double least_sum,
                               bool seldom_differs, const Queue& queue) {
  queue.launch("find_bad_estimates", find_bad_estimates_kernel, static_cast<unsigned>(row_blocks(t.rows)),
               kRowBlock, 0, t, most_expected, least_sum, seldom_differs);
}

void launch_find_high_estimates(const SparsifiedArena& t, bool base_2, const Queue& queue) {
  queue.launch("find_high_estimates", find_high_estimates_kernel, blocks_for(t.rows, kThreads), kThreads, 0,
               t, base_2);
}

void launch_offset_redraws(const SparsifiedArena& t, bool base_2, const Queue& queue) {
  queue.launch("offset_redraws", offset_redraws_kernel, blocks_for(t.rows, kThreads), kThreads, 0, t, base_2);
}

void launch_gather_redraws(const SparsifiedArena& t, int64_t i, const ConstMatrix& hidden, int64_t row_bytes,
                           const Queue& queue) {
  queue.launch("gather_redraws", gather_redraws_kernel,
               static_cast<unsigned>(std::min(t.portion, kGatherBlocks)), kThreads, 0, t, i,
               hidden.row<char>(0), hidden.stride * static_cast<int64_t>(size_of(hidden.dtype)), row_bytes);
}

}  // namespace logitless::cuda
