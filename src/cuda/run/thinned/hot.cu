// Hot columns: those of which the draw kept the most elements. Their elements are written into the columns of
// dz behind the dense ones, where the products do them for less than gathers would.
#include "cuda/rows/device_rows.cuh"
#include "cuda/run/thinned/append.cuh"
#include "cuda/run/thinned/most_counted.cuh"
#include "cuda/run/thinned/sizes.h"
#include "cuda/run/thinned/thinned.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

constexpr int kRowThreads = 128;
static_assert(kHotColumns <= kCountThreads);

// Ascending, whatever the order of the list. By one block.
__device__ void order_hot(const HotColumns& h) {
  __shared__ int32_t listed[kHotColumns];
  const int k = static_cast<int>(threadIdx.x), count = *h.listed_count;
  if (k < count) listed[k] = h.listed[k];
  __syncthreads();
  if (k >= h.hot) return;
  if (k >= count) {
    h.columns[k] = kIgnoredRow;
    return;
  }
  const int32_t own = listed[k];
  int place = 0;
  for (int i = 0; i < count; ++i) place += listed[i] < own;
  h.columns[place] = own;
  h.role[own] = static_cast<int32_t>(h.dense) + place;
  h.count[own] = 0;
}

// As many of the most counted columns as there is room for, but none of those with the first count that does
// not fit as a whole: no order has to decide between them.
__global__ void __launch_bounds__(kCountThreads) choose_hot_kernel(HotColumns h, CountBins bin_of) {
  const auto grid = cooperative_groups::this_grid();
  for (int64_t b = grid_thread(); b < kCountBins; b += grid_threads()) h.bins[b] = 0;
  if (grid_thread() == 0) *h.listed_count = 0;
  grid.sync();
  count_bins(h.count, h.vocab, kLeastHot, bin_of, h.bins);
  grid.sync();
  const int cutoff = find_cutoff(h.bins, h.hot);
  for (int64_t j = grid_thread(); j < h.vocab; j += grid_threads()) {
    if (h.count[j] <= kLeastHot || bin_of(h.count[j]) <= cutoff) continue;
    h.listed[atomicAdd(h.listed_count, 1)] = static_cast<int32_t>(j);
  }
  grid.sync();
  if (blockIdx.x == 0) order_hot(h);
}

// One block a row.
template <class T>
__global__ void __launch_bounds__(kRowThreads) spread_hot_kernel(SpreadHot s) {
  alignas(16) __shared__ T dz[kHotColumns];
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), hot = static_cast<int>(s.hot);
  for (int i = thread; i < hot; i += kRowThreads) dz[i] = from_float<T>(0);
  __syncthreads();
  const float scale = s.scale != nullptr ? *s.scale : 1.0f;
  const int count = s.kept_count[row];
  Kept* kept = s.kept + row * s.capacity;
  int left = 0;
  for (int first = 0; first < count; first += kRowThreads) {
    const int i = first + thread;
    const Kept element = i < count ? kept[i] : Kept{};
    const int place = i < count ? s.role[element.column] - static_cast<int>(s.dense) : -1;
    if (place >= 0) dz[place] = from_float<T>(element.value * scale);
    left = append<kRowThreads>(kept, left, i < count && place < 0, element);
  }
  if (thread == 0) s.kept_count[row] = left;
  __syncthreads();
  auto* to = reinterpret_cast<uint4*>(static_cast<T*>(s.dz) + row * s.dz_stride);
  const auto* from = reinterpret_cast<const uint4*>(dz);
  for (int i = thread; i < hot * static_cast<int>(sizeof(T)) / 16; i += kRowThreads) to[i] = from[i];
}

}  // namespace

void launch_choose_hot(const HotColumns& h, const Queue& queue) {
  launch_counting(choose_hot_kernel, queue, "choose_hot", h, CountBins::up_to(h.rows));
}

void launch_spread_hot(const SpreadHot& s, const Queue& queue) {
  if (s.rows == 0) return;
  for_dtype(s.dtype, [&](auto type) {
    queue.launch(spread_hot_kernel<decltype(type)>, static_cast<unsigned>(s.rows), kRowThreads, 0, s);
  });
  check_launch("spread_hot");
}

}  // namespace logitless::cuda
