// Frequent columns: those with the most elements kept by the draw. Their elements are written into the
// columns of dz behind the dense ones, where products cost less than gathers would.
#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/append.cuh"
#include "cuda/run/sparsified/most_counted.cuh"
#include "cuda/run/sparsified/sizes.h"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {
namespace {

constexpr int kRowThreads = 128;
static_assert(kFrequentColumns <= kCountThreads);

// Sorts the frequent columns, whatever the order of the list. Called by one block.
__device__ void order_frequent(const SparsifiedArena& t) {
  __shared__ int32_t listed[kFrequentColumns];
  const int k = static_cast<int>(threadIdx.x), count = *t.frequent_list;
  int32_t* columns = t.columns + t.sizes.dense;
  if (k < count) listed[k] = t.frequent_list[1 + k];
  __syncthreads();
  if (k >= t.sizes.frequent) return;
  if (k >= count) {
    columns[k] = kIgnoredRow;
    return;
  }
  const int32_t own = listed[k];
  int place = 0;
  for (int i = 0; i < count; ++i) place += listed[i] < own;
  columns[place] = own;
  t.role[own] = static_cast<int32_t>(t.sizes.dense) + place;
  t.column_count[own] = 0;
}

// Chooses the most counted columns that fit. Columns with the first count that does not fit as a whole are
// all left out, so that no order has to decide between them.
__global__ void __launch_bounds__(kCountThreads) choose_frequent_kernel(SparsifiedArena t, CountBins bin_of) {
  const int32_t* counts = t.column_count;
  const auto grid = cooperative_groups::this_grid();
  for (int64_t b = grid_thread(); b < kCountBins; b += grid_threads()) t.bins[b] = 0;
  if (grid_thread() == 0) *t.frequent_list = 0;
  grid.sync();
  count_bins(counts, t.vocab, kLeastFrequent, bin_of, t.bins);
  grid.sync();
  const int cutoff = find_cutoff(t.bins, t.sizes.frequent);
  for (int64_t j = grid_thread(); j < t.vocab; j += grid_threads()) {
    if (counts[j] <= kLeastFrequent || bin_of(counts[j]) <= cutoff) continue;
    t.frequent_list[1 + atomicAdd(t.frequent_list, 1)] = static_cast<int32_t>(j);
  }
  grid.sync();
  if (blockIdx.x == 0) order_frequent(t);
}

// One block for each row.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    spread_frequent_kernel(SparsifiedArena t, Matrix target, const float* scale_at) {
  alignas(16) __shared__ T dz[kFrequentColumns];
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), frequent = static_cast<int>(t.sizes.frequent);
  for (int i = thread; i < frequent; i += kRowThreads) dz[i] = from_float<T>(0);
  __syncthreads();
  const float scale = scale_at != nullptr ? *scale_at : 1.0f;
  const int count = t.kept_count[row];
  Kept* kept = t.kept + row * t.sizes.capacity;
  int left = 0;
  for (int first = 0; first < count; first += kRowThreads) {
    const int i = first + thread;
    const Kept element = i < count ? kept[i] : Kept{};
    const int place = i < count ? t.role[element.column] - static_cast<int>(t.sizes.dense) : -1;
    if (place >= 0) dz[place] = from_float<T>(element.value * scale);
    left = append<kRowThreads>(kept, left, i < count && place < 0, element);
  }
  if (thread == 0) t.kept_count[row] = left;
  __syncthreads();
  auto* to = reinterpret_cast<uint4*>(target.row<T>(row));
  const auto* from = reinterpret_cast<const uint4*>(dz);
  for (int i = thread; i < frequent * static_cast<int>(sizeof(T)) / 16; i += kRowThreads) to[i] = from[i];
}

}  // namespace

void launch_choose_frequent(const SparsifiedArena& t, const Queue& queue) {
  launch_counting(choose_frequent_kernel, queue, "choose_frequent", t, CountBins::up_to(t.rows));
}

void launch_spread_frequent(const SparsifiedArena& t, const Matrix& dz, const float* scale,
                            const Queue& queue) {
  if (t.rows == 0) return;
  for_dtype(dz.dtype, [&](auto type) {
    queue.launch("spread_frequent", spread_frequent_kernel<decltype(type)>, static_cast<unsigned>(t.rows),
                 kRowThreads, 0, t, dz, scale);
  });
}

}  // namespace logitless::cuda
