#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/most_counted.cuh"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

// Returns the beginning of stretch s of the vocabulary. The first stretches have an eighth of the average
// width, the last ones nearly twice as much: a BPE vocabulary begins with the columns that have most of a
// softmax. (In a shard that is not the first it makes little difference.)
__device__ int64_t stretch_start(const ChooseColumns& c, int64_t s) {
  return c.vocab * s * (c.sampled + 7 * s) / (8 * c.sampled * c.sampled);
}

// Returns the number of dense columns before column j.
__device__ int64_t dense_before(const ChooseColumns& c, int64_t j) {
  int64_t first = 0, last = c.dense;
  while (first < last) {
    const int64_t middle = (first + last) / 2;
    if (c.dense_columns[middle] < j) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

// Chooses sample s: the middle of its stretch, or a column near it, because dense columns are no samples.
__device__ void sample_column(const ChooseColumns& c, int64_t s) {
  const int64_t start = stretch_start(c, s), end = stretch_start(c, s + 1), middle = (start + end) / 2;
  const int64_t candidates = end - start - (dense_before(c, end) - dense_before(c, start));
  c.sample_others[s] = static_cast<float>(candidates - 1);
  c.sample[s] = kIgnoredRow;
  if (candidates == 0) return;
  int64_t j = middle;
  while (j < end && c.role[j] >= 0) ++j;
  if (j == end) {
    for (j = middle - 1; c.role[j] >= 0;) --j;
  }
  c.sample[s] = static_cast<int32_t>(j);
  c.role[j] = static_cast<int32_t>(-2 - s);
}

__global__ void __launch_bounds__(kCountThreads) choose_columns_kernel(ChooseColumns c) {
  using Scan = cub::BlockScan<uint64_t, kCountThreads>;
  __shared__ typename Scan::TempStorage scratch;
  const auto grid = cooperative_groups::this_grid();
  const int64_t thread = grid_thread(), threads = grid_threads();
  if (thread == 0 && c.seed != nullptr) {
    *c.seed = static_cast<uint64_t>(c.given_seed != nullptr ? *c.given_seed : c.known_seed);
  }
  for (int64_t j = thread; j < c.vocab; j += threads) c.count[j] = 0;
  for (int64_t b = thread; b < kCountBins; b += threads) c.bins[b] = 0;
  grid.sync();
  for (int64_t i = thread; i < c.tokens; i += threads) {
    if (c.target[i] >= 0) atomicAdd(c.count + c.target[i], 1);
  }
  grid.sync();
  constexpr CountBins bin_of;
  count_bins(c.count, c.vocab, 0, bin_of, c.bins);
  grid.sync();

  // A thread ranks a few neighboring columns. The upper half of a number counts columns above the cutoff, the
  // lower half those at it.
  const int cutoff = find_cutoff(c.bins, c.dense);
  const auto term = [&](int64_t j) {
    const int bin = bin_of(c.count[j]);
    return static_cast<uint64_t>(bin > cutoff) << 32 | static_cast<uint64_t>(bin == cutoff);
  };
  const int64_t each = (c.vocab + threads - 1) / threads;
  const int64_t first = thread * each, end = min(first + each, c.vocab);
  uint64_t own = 0, rank = 0, block = 0;
  for (int64_t j = first; j < end; ++j) own += term(j);
  Scan(scratch).ExclusiveSum(own, rank, block);
  if (threadIdx.x == 0) c.totals[blockIdx.x] = block;
  grid.sync();
  uint64_t total = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) {
    if (b < blockIdx.x) rank += c.totals[b];
    total += c.totals[b];
  }
  // Room for columns at the cutoff, of which the first are chosen.
  const int64_t room = c.dense - static_cast<int64_t>(total >> 32);
  for (int64_t j = first; j < end; ++j) {
    const uint64_t one = term(j);
    const int64_t above = static_cast<int64_t>(rank >> 32), equal = static_cast<uint32_t>(rank);
    const bool chosen = one >> 32 != 0 || (one != 0 && equal < room);
    const int64_t number = above + min(equal, room);
    c.role[j] = chosen ? static_cast<int32_t>(number) : -1;
    if (chosen) c.dense_columns[number] = static_cast<int32_t>(j);
    if (chosen && c.dense_copy != nullptr) c.dense_copy[number] = static_cast<int32_t>(j);
    rank += one;
  }
  grid.sync();
  for (int64_t s = thread; s < c.sampled; s += threads) sample_column(c, s);
}

__global__ void __launch_bounds__(kThreads) assign_roles_kernel(SparsifiedArena t) {
  __shared__ int32_t columns[kDenseColumns];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t dense = t.sizes.dense;
  for (int64_t k = threadIdx.x; k < dense; k += kThreads) columns[k] = t.lists.dense[k];
  __syncthreads();
  const auto role_of = [&](int32_t column) {
    int32_t first = 0,
            last = static_cast<int32_t>(dense);  // the first one that is not below lies between these
    while (first < last) {
      const int32_t middle = (first + last) / 2;
      if (columns[middle] < column) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first < dense && columns[first] == column ? first : -1;
  };
  if (i < dense) t.columns[i] = columns[i];
  if (i < t.vocab) t.role[i] = role_of(static_cast<int32_t>(i));
  if (i <= t.vocab && t.lists_columns) t.column_count[i] = 0;
  if (i == 0 && t.lists_columns) *t.heavy = 0;
  if (i >= t.rows) return;
  const int32_t y = t.base.target[i];
  t.dense_target[i] = y == kIgnoredRow ? kIgnoredRow : y >= 0 ? role_of(y) : -1;
}

__global__ void gather_vector_kernel(const float* vector, const int32_t* columns, int64_t count, float* out) {
  const int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (k < count) out[k] = vector[columns[k]];
}

}  // namespace

void launch_choose_columns(const ChooseColumns& c, const Queue& queue) {
  launch_counting(choose_columns_kernel, queue, "choose_columns", c);
}

void launch_assign_roles(const SparsifiedArena& t, const Queue& queue) {
  queue.launch("assign_roles", assign_roles_kernel, blocks_for(std::max(t.vocab + 1, t.rows), kThreads),
               kThreads, 0, t);
}

void launch_gather_vector(const float* vector, const int32_t* columns, int64_t count, float* out,
                          const Queue& queue) {
  queue.launch("gather_vector", gather_vector_kernel, blocks_for(count, kThreads), kThreads, 0, vector,
               columns, count, out);
}

}  // namespace logitless::cuda
