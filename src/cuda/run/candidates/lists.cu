#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "cuda/rows/device_rows.cuh"
#include "cuda/run/candidates/candidates.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ void check_offsets_kernel(CandidateLists lists, WrongLists* wrong) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= lists.rows) return;
  const int64_t begin = lists.offsets[row], end = lists.offsets[row + 1];
  const bool ends = row + 1 < lists.rows || end == lists.elements;
  if (begin > end || (row == 0 && begin != 0) || !ends) wrong->offsets = 1;
}

__global__ void columns_kernel(CandidateLists lists, int32_t* column, int32_t* unit_row, WrongLists* wrong) {
  const int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e >= lists.elements) return;
  if (e % kUnit == 0) unit_row[e / kUnit] = static_cast<int32_t>(lists.row_of(e));
  const int64_t id = lists.id(e);
  if (!lists.is_valid(id)) {
    atomicAdd(&wrong->ids, 1);
    atomicMax(&wrong->from_last, static_cast<int32_t>(lists.elements - e));
    column[e] = kInvalidElement;
  } else {
    column[e] = id == lists.ignore_id ? kNoElement : static_cast<int32_t>(id);
  }
}

// u of an element, and its column; u is 0 for no element.
template <class Real>
struct Element {
  int32_t column;
  Real u;
};
template <class Real>
__device__ Element<Real> element_of(const Candidates& c, int64_t row, int64_t e) {
  const int64_t id = c.lists.id(e);
  const Real grad = static_cast<const Real*>(c.grad)[e];
  if (id == c.lists.ignore_id || !c.lists.is_valid(id) || grad == 0) return {0, 0};
  const Real z = c.factors.is_linear() ? Real(0) : static_cast<const Real*>(c.logits)[e];
  const Real of_row = c.row_temperature != nullptr
                          ? inverse_temperature(static_cast<const Real*>(c.row_temperature)[row])
                          : Real(1);
  return {static_cast<int32_t>(id), c.factors.gradient(grad, z, of_row)};
}

// One warp for each row.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    row_lists_kernel(const __grid_constant__ Candidates c, CandidatesArenaOf<Real> arena) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= c.lists.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t begin = c.lists.begin(row);
  const int64_t end = arena.wrong->offsets != 0 ? begin : c.lists.begin(row + 1);
  int32_t count = 0;
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t e = first + lane;
    const Element<Real> element = e < end ? element_of<Real>(c, row, e) : Element<Real>{0, 0};
    const unsigned found = __ballot_sync(~0u, element.u != 0);
    if (element.u != 0) {
      arena.kept[begin + count + __popc(found & ((1u << lane) - 1))] = {
          element.column, element.u * static_cast<Real>(c.product_scale)};
    }
    count += __popc(found);
  }
  if (lane == 0) arena.kept_count[row] = count;
}

// One warp for each row. It counts the elements of each tile, and then puts them in their places.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    tile_lists_kernel(const __grid_constant__ Candidates c, CandidatesArenaOf<Real> arena) {
  __shared__ int32_t next_of_warps[kWarps][kMostTiles];
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= c.lists.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>(arena.whole.tile), tiles = static_cast<int>(arena.whole.tiles);
  const int64_t begin = c.lists.begin(row);
  const int64_t end = arena.wrong->offsets != 0 ? begin : c.lists.begin(row + 1);
  int32_t* next = next_of_warps[threadIdx.x / 32];
  for (int t = lane; t < tiles; t += 32) next[t] = 0;
  __syncwarp();
#pragma unroll 4
  for (int64_t e = begin + lane; e < end; e += 32) {
    const Element<Real> element = element_of<Real>(c, row, e);
    if (element.u != 0) atomicAdd(next + element.column / tile, 1);
  }
  __syncwarp();
  int32_t* start = arena.tile_start + row * (tiles + 1);
  int32_t before = 0;
  for (int first = 0; first < tiles; first += 32) {
    const int32_t count = first + lane < tiles ? next[first + lane] : 0;
    int32_t sum = count;  // up to this lane
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (first + lane < tiles) start[first + lane] = next[first + lane] = before + sum - count;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) start[tiles] = before;
  __syncwarp();
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t e = first + lane;
    const Element<Real> element = e < end ? element_of<Real>(c, row, e) : Element<Real>{0, 0};
    const int to = element.u != 0 ? element.column / tile : tiles;
    const unsigned equal = __match_any_sync(~0u, to);
    const int32_t place = to < tiles ? next[to] + __popc(equal & ((1u << lane) - 1)) : 0;
    __syncwarp();
    if (to < tiles) {
      arena.kept[begin + place] = {element.column, element.u};
      if ((equal >> lane) == 1) next[to] = place + 1;
    }
    __syncwarp();
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    keys_kernel(const __grid_constant__ Candidates c, CandidatesArenaOf<Real> arena) {
  const int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e >= c.lists.elements) return;
  const int64_t row = c.lists.row_of(e);
  const Element<Real> element = arena.wrong->offsets != 0 ? Element<Real>{0, 0} : element_of<Real>(c, row, e);
  arena.by_element[e] = {static_cast<int32_t>(row), element.u};
  arena.key[e] = element.u != 0 ? element.column : static_cast<int32_t>(c.lists.vocab);
  arena.order[e] = static_cast<int32_t>(e);
}

// Returns the number of sorted keys below a column.
__device__ int32_t keys_below(const int32_t* keys, int64_t count, int64_t column) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<int32_t>(low);
}

// A thread for each element, and one for each column's start.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    arrange_kernel(const __grid_constant__ Candidates c, CandidatesArenaOf<Real> arena) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, elements = c.lists.elements;
  const int32_t* keys = arena.key + elements;
  if (i < elements && keys[i] < c.lists.vocab) {
    KeptRowOf<Real> element = arena.by_element[arena.order[elements + i]];
    element.value *= static_cast<Real>(c.product_scale);
    arena.sorted[i] = element;
  }
  if (i > c.lists.vocab) return;
  const int32_t start = keys_below(keys, elements, i);
  arena.start[i] = start;
  if (i < c.lists.vocab && keys_below(keys, elements, i + 1) - start > kHeavyColumn) {
    arena.heavy[1 + atomicAdd(arena.heavy, 1)] = static_cast<int32_t>(i);
  }
}

// One warp for each column.
template <class Bias, class Real = RealOf<Bias>>
__global__ void __launch_bounds__(kThreads)
    d_bias_kernel(CandidatesArenaOf<Real> arena, int64_t elements, int64_t vocab, Bias* d_bias) {
  const int64_t column = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (column >= vocab) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Real sum = 0;
  for (int32_t i = arena.start[column] + lane; i < arena.start[column + 1]; i += 32) {
    sum += arena.by_element[arena.order[elements + i]].value;
  }
  sum = warp_sum(sum);
  if (lane == 0) d_bias[column] = from_real<Bias>(sum);
}

}  // namespace

size_t sort_bytes(int64_t elements) {
  size_t bytes = 0;
  const int32_t* in = nullptr;
  int32_t* out = nullptr;
  check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, in, out, in, out, static_cast<int32_t>(elements)),
        "scratch of a sort");
  return bytes;
}

void launch_check_offsets(const CandidateLists& lists, WrongLists* wrong, const Queue& queue) {
  if (lists.offsets == nullptr) return;
  queue.launch("check_offsets", check_offsets_kernel, blocks_for(lists.rows, kThreads), kThreads, 0, lists,
               wrong);
}

void launch_columns(const CandidateLists& lists, int32_t* column, int32_t* unit_row, WrongLists* wrong,
                    const Queue& queue) {
  queue.launch("candidate_columns", columns_kernel, blocks_for(lists.elements, kThreads), kThreads, 0, lists,
               column, unit_row, wrong);
}

template <class Real>
void launch_row_lists(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  queue.launch("row_lists", row_lists_kernel<Real>, blocks_for(c.lists.rows, kWarps), kThreads, 0, c, arena);
}

template <class Real>
void launch_tile_lists(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  queue.launch("tile_lists", tile_lists_kernel<Real>, blocks_for(c.lists.rows, kWarps), kThreads, 0, c,
               arena);
}

template <class Real>
void launch_column_lists(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  const int64_t elements = c.lists.elements, vocab = c.lists.vocab;
  queue.clear(arena.heavy, sizeof(int32_t));
  if (elements > 0) {
    queue.launch("candidate_keys", keys_kernel<Real>, blocks_for(elements, kThreads), kThreads, 0, c, arena);
    queue.call([arena, elements, vocab](cudaStream_t stream) {
      size_t bytes = arena.sort_bytes;
      const int bits = std::bit_width(static_cast<uint64_t>(vocab));
      check(cub::DeviceRadixSort::SortPairs(arena.sort, bytes, arena.key, arena.key + elements, arena.order,
                                            arena.order + elements, static_cast<int32_t>(elements), 0, bits,
                                            stream),
            "sort of candidates");
    });
  }
  queue.launch("arrange_candidates", arrange_kernel<Real>,
               blocks_for(std::max(elements, vocab + 1), kThreads), kThreads, 0, c, arena);
  if (c.d_bias == nullptr) return;
  for_dtype<Real>(c.d_bias_dtype, [&](auto element) {
    using Bias = decltype(element);
    queue.launch("candidate_bias", d_bias_kernel<Bias>, blocks_for(vocab, kWarps), kThreads, 0, arena,
                 elements, vocab, static_cast<Bias*>(c.d_bias));
  });
}

#define LOGITLESS_INSTANTIATE(Real)                                                                 \
  template void launch_row_lists(const Candidates&, const CandidatesArenaOf<Real>&, const Queue&);  \
  template void launch_tile_lists(const Candidates&, const CandidatesArenaOf<Real>&, const Queue&); \
  template void launch_column_lists(const Candidates&, const CandidatesArenaOf<Real>&, const Queue&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
