#include <cmath>

#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/logit_offset.h"

namespace logitless::cuda {
namespace {

// Range of a row's sum of exp logits relative to its logit offset, without optional sums. Upper end: fp32
// holds the exp logits, and bf16 products of the stored values (times 2^kKeptExponent) leave 2^60 for their
// other operand. Lower end: an exp of 2^-40 of the sum is stored as a normal number.
constexpr SumRange kRange{0x1p-28, 0x1p125};
static_assert(-28 - 40 + kKeptExponent == -126);

// Threads for each row: there may be few rows, with many partials each.
constexpr int kParts = 8;

// One block of threads for each block of rows.
__global__ void __launch_bounds__(kRowBlock* kParts)
    find_redo_kernel(Arena arena, int64_t rows, const int32_t* row_count, const int32_t* target) {
  __shared__ double sums[kParts][kRowBlock];
  const int64_t i = threadIdx.x % kRowBlock, part = threadIdx.x / kRowBlock;
  const int64_t r = int64_t{blockIdx.x} * kRowBlock + i;
  const PartialStats& partials = arena.partials;
  const bool exists = r < existing(row_count, rows) && target[r] != kIgnoredRow;
  double sum = 0;
  if (exists) {
#pragma unroll 8
    for (int64_t s = part; s < partials.partials; s += kParts) sum += partials.sum[s * partials.stride + r];
  }
  sums[part][i] = sum;
  __syncthreads();
  bool redo = false;
  if (exists && part == 0) {
    for (int p = 1; p < kParts; ++p) sum += sums[p][i];
    const SumRange range = range_of_sums(partials, kRange);
    redo = !(sum < range.most && sum > range.least);  // also for NaN: the logit offset itself may be -inf
    if (redo) arena.logit_offset[r] = CUDART_NAN_F;
  }
  redo = __syncthreads_or(redo);
  if (threadIdx.x == 0) arena.active[blockIdx.x] = redo;
  if (!redo || r >= rows) return;
  for (int64_t s = part; s < partials.partials; s += kParts) clear_partial(partials, s * partials.stride + r);
}

// One block of threads for each block of rows.
__global__ void __launch_bounds__(kRowBlock)
    offset_from_partials_kernel(Arena arena, int64_t rows, const int32_t* row_count, bool again,
                                bool in_group) {
  const int64_t r = int64_t{blockIdx.x} * kRowBlock + threadIdx.x;
  if (r >= rows || arena.active[blockIdx.x] == 0) return;
  if (r < existing(row_count, rows) && (!again || isnan(arena.logit_offset[r]))) {
    const LogSumExp<float> lse = split_to<float>(log_sum_exp_parts(joined(arena.partials, r)));
    arena.logit_offset[r] = in_group && lse.high == -CUDART_INF_F ? 0 : lse.high;
    arena.lse_residual[r] = lse.low;
  }
  if (again) clear_row(arena.partials, r);
}

}  // namespace

bool may_leave_range(double most_above_offset, int64_t vocab, const PartialStats& partials) {
  const double most = std::log(static_cast<double>(vocab)) + most_above_offset;
  return !(most < std::log(range_of_sums(partials, kRange).most) - 1);
}

void launch_find_redo(const Arena& arena, int64_t rows, const int32_t* row_count, const int32_t* target,
                      const Queue& queue) {
  queue.launch("find_redo", find_redo_kernel, static_cast<unsigned>(row_blocks(rows)), kRowBlock * kParts, 0,
               arena, rows, row_count, target);
}

void launch_offset_from_partials(const Arena& arena, int64_t rows, const int32_t* row_count, bool again,
                                 const Queue& queue, bool in_group) {
  queue.launch("offset_from_partials", offset_from_partials_kernel, static_cast<unsigned>(row_blocks(rows)),
               kRowBlock, 0, arena, rows, row_count, again, in_group);
}

}  // namespace logitless::cuda
