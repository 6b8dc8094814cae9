#include "cuda/run/top/top.h"

#include <cfloat>

#include "cuda/rows/device_rows.cuh"
#include "cuda/run/top/selection.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kRedoBlocks = 256;
using Selection = TopSelection<kThreads, float>;

__global__ void __launch_bounds__(kThreads)
    sample_bias_kernel(const float* bias, int64_t step, int64_t count, float* sample) {
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j < count) sample[j] = bias[j * step];
}

__global__ void __launch_bounds__(kThreads)
    sample_mask_kernel(ColumnMask mask, const int32_t* row_map, TopRows rows, int64_t step, int64_t count,
                       int32_t* sample) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, words = mask_words(count), row = i / words;
  if (row >= existing(rows.row_count, rows.rows)) return;
  const int32_t* of_row = mask.of_row(row_map[row]);
  const int64_t first = i % words * 32;
  uint32_t bits = 0;
  for (int64_t j = first; j < first + 32 && j < count; ++j) {
    if (ColumnMask::has(of_row, j * step)) bits |= 1u << (j - first);
  }
  sample[i] = static_cast<int32_t>(bits);
}

__global__ void __launch_bounds__(kThreads)
    thresholds_kernel(TopArena top, int groups, int step, int k, int64_t rows, const int32_t* row_count) {
  __shared__ Selection::Shared shared;
  const int64_t row = blockIdx.x;
  if (row == 0 && threadIdx.x == 0) *top.redo_count = 0;
  if (row >= existing(row_count, rows)) return;
  const float* maxima = top.group_max + row * groups;
  TopEntry<float>* best = top.best + row * k;  // scratch until the lists are there
  Selection selection(shared, k);
  join_to_best(selection, best, k, /*first=*/true, groups, [&](int64_t g) {
    return TopEntry<float>{maxima[g], static_cast<int32_t>(g)};
  });
  if (threadIdx.x != 0) return;
  // A NaN becomes +inf, so that only NaN are listed beside it. -inf becomes the least number, so that no -inf
  // is listed.
  float least = selection.least().z;
  if (least == -CUDART_INF_F) {
    // Masks leave few of the sample's groups. A maximum stands for `step` columns, so m maxima are enough
    // where m * step is well above k. A list that then has fewer than k entries is done again.
    int left = k - 1;
    while (left > 0 && selection.entry(left - 1).z == -CUDART_INF_F) --left;
    if (left > 0 && left * step >= 2 * k) least = selection.entry(left - 1).z;
  }
  top.threshold[row] = isnan(least) ? CUDART_INF_F : fmaxf(least, -FLT_MAX);
  top.count[row] = 0;
}

// Appends the first columns that are not among the `taken` first entries, up to k. Called by one thread.
__device__ void fill_with_masked(TopEntry<float>* best, int taken, int k) {
  int32_t column = 0;
  for (int i = taken; i < k; ++column) {
    bool is_taken = false;
    for (int j = 0; j < taken; ++j) is_taken = is_taken || best[j].column == column;
    if (!is_taken) best[i++] = {-CUDART_INF_F, column};
  }
}

__global__ void __launch_bounds__(kThreads) choose_listed_kernel(TopArena top, int capacity, TopRows rows) {
  __shared__ Selection::Shared shared;
  const int64_t row = blockIdx.x;
  if (row >= existing(rows.row_count, rows.rows) || rows.target[row] == kIgnoredRow) return;
  const int count = top.count[row];
  const bool lacks = count < rows.k;
  if (count > capacity || (lacks && top.threshold[row] != -FLT_MAX)) {
    if (threadIdx.x == 0) top.redo_rows[atomicAdd(top.redo_count, 1)] = static_cast<int32_t>(row);
    return;
  }
  const TopEntry<float>* listed = top.listed + row * capacity;
  TopEntry<float>* best = top.best + row * rows.k;
  Selection selection(shared, rows.k);
  join_to_best(selection, best, rows.k, /*first=*/true, count, [&](int64_t i) { return listed[i]; });
  if (!lacks) return;
  __syncthreads();  // best is written
  if (threadIdx.x == 0) fill_with_masked(best, count, rows.k);
}

// The element as an operand of a dtype.
__device__ float element(const ConstMatrix& m, int64_t row, int64_t column, DType operand) {
  const float x = load_as<float>(m.data, m.dtype, row * m.stride + column);
  return m.dtype == operand ? x : as_operand(x, operand);
}

// Called by a warp; lane 0 gets the result.
__device__ float logit_of(const RedoTop& r, int64_t row, int64_t column) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float dot = 0;
#pragma unroll 4
  for (int64_t d = lane; d < r.depth; d += 32) {
    dot = fmaf(element(r.hidden, row, d, r.hidden.dtype), element(r.weight, column, d, r.hidden.dtype), dot);
  }
  return r.transform.logit(warp_sum(dot), r.transform.bias_of(column),
                           r.transform.inverse_temperature_of(row));
}

// The largest logit of a row; NaN if there is one.
__device__ float maximum_of(const PartialStats& stats, int64_t row) {
  float largest = -CUDART_INF_F;
  for (int64_t s = 0; s < stats.partials; ++s) {
    const float max = stats.max[s * stats.stride + row];
    if (max > largest || isnan(max)) largest = max;
    if (isnan(largest)) break;
  }
  return largest;
}

__global__ void __launch_bounds__(kThreads) redo_kernel(TopArena top, TopRows rows, RedoTop r) {
  __shared__ Selection::Shared shared;
  __shared__ float logits[kThreads];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Selection selection(shared, rows.k);
  for (int i = static_cast<int>(blockIdx.x); i < *top.redo_count; i += static_cast<int>(gridDim.x)) {
    const int64_t row = top.redo_rows[i];
    const float largest = maximum_of(r.stats, row);
    const int32_t* mask = r.mask.words != nullptr ? r.mask.of_row(r.row_map[row]) : nullptr;
    selection.begin(no_entry<float>());
    for (int64_t first = 0; first < r.columns; first += kThreads) {
      const int count = static_cast<int>(r.columns - first < kThreads ? r.columns - first : kThreads);
      for (int j = warp; j < count; j += kWarps) {
        const bool is_masked = mask != nullptr && !ColumnMask::has(mask, first + j);
        const float z = is_masked ? -CUDART_INF_F : logit_of(r, row, first + j);
        if (threadIdx.x % 32 == 0) logits[j] = z;
      }
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < count) {
        selection.offer(
            {logits[threadIdx.x], static_cast<int32_t>(first) + static_cast<int32_t>(threadIdx.x)});
      }
      selection.settle();
      // Once there are k entries that nothing exceeds, later columns are no better. That is the case early in
      // rows whose logits are all equal or NaN.
      if (first == 0) selection.cut();
      const float least = selection.least().z;
      if (least >= largest ? largest != -CUDART_INF_F : isnan(least)) break;  // > by a rounding
    }
    selection.cut();
    if (threadIdx.x < rows.k) {
      top.best[row * rows.k + threadIdx.x] = selection.entry(static_cast<int>(threadIdx.x));
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    write_top_kernel(ArenaOf<Real> arena, int64_t first, TopRows rows, Buffers out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, r = i / rows.k;
  if (r >= existing(rows.row_count, rows.rows) || rows.target[r] == kIgnoredRow) return;
  const TopEntry<Real> entry = arena.top.best[i];
  const int64_t at = int64_t{arena.row_map[first + r]} * rows.k + i % rows.k;
  if (out.top_ids != nullptr) out.top_ids[at] = entry.column;
  store_if<Real>(out.top_log_probs, at,
                 (double{entry.z} - double{arena.lse[r]}) - double{arena.lse_residual[r]});
}

// A logit and its global id. -1 means none, which comes after all others.
struct GroupEntry {
  float z;
  int32_t id;
};

__device__ bool comes_before(const GroupEntry& a, const GroupEntry& b) {
  if (a.id < 0 || b.id < 0) return a.id >= 0;
  return logitless::is_better(a.z, a.id, b.z, b.id);
}

// The first entry of a rank's list that comes after another one.
__device__ GroupEntry next_of(const GroupStats& group, int64_t rank, int64_t r, const TopRows& rows,
                              const GroupEntry& last, bool is_first) {
  const auto entry = [&](int i) {
    const int64_t at = rank * group.partials.stride + i * rows.rows + r;
    return GroupEntry{group.top_logit[at], group.top_id[at]};
  };
  int begin = 0, end = rows.k;
  while (begin < end && !is_first) {
    const int middle = (begin + end) / 2;
    if (comes_before(last, entry(middle))) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin < rows.k ? entry(begin) : GroupEntry{0, -1};
}

// One warp for each row merges the lists of all ranks, which have at least k entries together.
__global__ void __launch_bounds__(kThreads)
    write_group_top_kernel(Arena arena, GroupStats group, int64_t first, TopRows rows, Buffers out) {
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r >= existing(rows.row_count, rows.rows) || rows.target[r] == kIgnoredRow) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const LogSumExp<double> lse{arena.lse[r], arena.lse_residual[r]};
  const int64_t at = int64_t{arena.row_map[first + r]} * rows.k;
  GroupEntry last{0, -1};
  for (int i = 0; i < rows.k; ++i) {
    GroupEntry best{0, -1};
    for (int64_t rank = lane; rank < group.partials.partials; rank += 32) {
      const GroupEntry next = next_of(group, rank, r, rows, last, i == 0);
      if (comes_before(next, best)) best = next;
    }
    for (int step = 16; step > 0; step /= 2) {
      const GroupEntry other{__shfl_xor_sync(~0u, best.z, step), __shfl_xor_sync(~0u, best.id, step)};
      if (comes_before(other, best)) best = other;
    }
    last = best;
    if (lane != 0) continue;
    if (out.top_ids != nullptr) out.top_ids[at + i] = best.id;
    store_if<float>(out.top_log_probs, at + i, lse.log_p(best.z));
  }
}

}  // namespace

void launch_sample_bias(const float* bias, int64_t step, int64_t count, float* sample, const Queue& queue) {
  queue.launch("sample_bias", sample_bias_kernel, blocks_for(count, kThreads), kThreads, 0, bias, step, count,
               sample);
}

void launch_sample_mask(const ColumnMask& mask, const int32_t* row_map, const TopRows& rows, int64_t step,
                        int64_t count, int32_t* sample, const Queue& queue) {
  queue.launch("sample_mask", sample_mask_kernel, blocks_for(rows.rows * mask_words(count), kThreads),
               kThreads, 0, mask, row_map, rows, step, count, sample);
}

void launch_thresholds(const TopArena& top, const TopSizes& sizes, int64_t k, int64_t rows,
                       const int32_t* row_count, const Queue& queue) {
  queue.launch("thresholds", thresholds_kernel, blocks_for(rows, 1), kThreads, 0, top,
               static_cast<int>(sizes.groups), static_cast<int>(sizes.step), static_cast<int>(k), rows,
               row_count);
}

void launch_choose_listed(const TopArena& top, int capacity, const TopRows& rows, const Queue& queue) {
  queue.launch("choose_listed", choose_listed_kernel, blocks_for(rows.rows, 1), kThreads, 0, top, capacity,
               rows);
}

void launch_redo_top(const TopArena& top, const TopRows& rows, const RedoTop& redo, const Queue& queue) {
  queue.launch("redo_top", redo_kernel, kRedoBlocks, kThreads, 0, top, rows, redo);
}

template <class Real>
void launch_write_top(const ArenaOf<Real>& arena, int64_t first, const TopRows& rows, const Buffers& out,
                      const Queue& queue) {
  queue.launch("write_top", write_top_kernel<Real>, blocks_for(rows.rows * rows.k, kThreads), kThreads, 0,
               arena, first, rows, out);
}
template void launch_write_top(const Arena&, int64_t, const TopRows&, const Buffers&, const Queue&);
template void launch_write_top(const ArenaOf<double>&, int64_t, const TopRows&, const Buffers&, const Queue&);

void launch_write_group_top(const Arena& arena, const GroupStats& group, int64_t first, const TopRows& rows,
                            const Buffers& out, const Queue& queue) {
  queue.launch("write_group_top", write_group_top_kernel, blocks_for(rows.rows, kWarps), kThreads, 0, arena,
               group, first, rows, out);
}

}  // namespace logitless::cuda
