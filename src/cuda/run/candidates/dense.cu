#include "cuda/rows/device_rows.cuh"
#include "cuda/run/candidates/candidates.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileThreads = 32 * kTileWarps;

// One block for each row. A thread waits for several products at once.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    pick_products_kernel(CandidateLists lists, const int32_t* column, int64_t first_row, ConstMatrix products,
                         Real* picked) {
  constexpr int kAtOnce = 8;
  const int64_t row = first_row + blockIdx.x, end = lists.begin(row + 1);
  const Real* from = products.row<Real>(blockIdx.x);
  for (int64_t e = lists.begin(row) + threadIdx.x; e < end; e += kAtOnce * kThreads) {
    int32_t columns[kAtOnce];
    Real found[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      columns[k] = e + k * kThreads < end ? column[e + k * kThreads] : kNoElement;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) found[k] = columns[k] >= 0 ? from[columns[k]] : Real(0);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (columns[k] >= 0) picked[e + k * kThreads] = found[k];
    }
  }
}

// Four columns of a tile.
template <class T>
struct alignas(sizeof(T) == 2 ? 8 : 16) Vector4 {
  T x[4];
};

// Sums of a tile's columns, which belong to one warp.
template <class Real>
struct TileSums {
  Vector4<Real> columns[kTileBytes / sizeof(Vector4<Real>)];

  __device__ Real& operator[](int place) { return columns[place / 4].x[place % 4]; }
};

__device__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % 32;
}

// Calls f(i) for each group of four columns.
template <class F>
__device__ void for_fours(int64_t tile, F&& f) {
  for (int i = lane_of_thread(); i < tile / 4; i += 32) f(i);
}

// Sum over the lanes of a mask, in their order. All lanes call it, each with a mask that is not 0.
template <class Real>
__device__ Real sum_of_lanes(unsigned lanes, Real value) {
  Real sum = 0;
  do {
    const Real other = __shfl_sync(~0u, value, lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : 0);
    if (lanes != 0) sum += other;
    lanes &= lanes - 1;
  } while (__any_sync(~0u, lanes != 0));
  return sum;
}

// Adds a row's elements of a tile, 32 at a time. The first lane of a column adds the sum of all its lanes, so
// no two threads add to one place, and the order is fixed.
template <class Real>
__device__ void add_row(TileSums<Real>& sums, const CandidateLists& lists,
                        const CandidatesArenaOf<Real>& arena, int64_t row, int64_t tile) {
  const int lane = lane_of_thread(), first_column = static_cast<int>(tile * arena.whole.tile);
  const int32_t* start = arena.tile_start + row * (arena.whole.tiles + 1) + tile;
  const KeptOf<Real>* list = arena.kept + lists.begin(row);
  const int end = start[1];
  for (int base = start[0]; base < end; base += 32) {
    const bool exists = base + lane < end;
    const KeptOf<Real> element = exists ? list[base + lane] : KeptOf<Real>{0, 0};
    const int place = exists ? element.column - first_column : ~lane;
    const unsigned equal = __match_any_sync(~0u, place);
    const Real sum = sum_of_lanes(equal, element.value);
    if (exists && lane == __ffs(static_cast<int>(equal)) - 1) sums[place] += sum;
    __syncwarp();
  }
}

// One warp for each row and tile.
template <class T, class Real = RealOf<T>>
__global__ void __launch_bounds__(kTileThreads)
    spread_kernel(CandidateLists lists, CandidatesArenaOf<Real> arena, int64_t first_tile, int64_t tiles,
                  Real factor, Matrix dz) {
  __shared__ TileSums<Real> sums_of_warps[kTileWarps];
  const int64_t row = blockIdx.x, tile = int64_t{blockIdx.y} * kTileWarps + threadIdx.x / 32;
  if (tile >= tiles) return;
  TileSums<Real>& sums = sums_of_warps[threadIdx.x / 32];
  for_fours(arena.whole.tile, [&](int i) { sums.columns[i] = {}; });
  __syncwarp();
  add_row(sums, lists, arena, row, first_tile + tile);
  auto* out = reinterpret_cast<Vector4<T>*>(dz.row<T>(row) + tile * arena.whole.tile);
  for_fours(arena.whole.tile, [&](int i) {
    const Vector4<Real> four = sums.columns[i];
    Vector4<T> rounded;
#pragma unroll
    for (int k = 0; k < 4; ++k) rounded.x[k] = from_real<T>(factor * four.x[k]);
    out[i] = rounded;
  });
}

// One warp for each group of rows and tile.
template <class Real>
__global__ void __launch_bounds__(kTileThreads)
    bias_sums_kernel(CandidateLists lists, CandidatesArenaOf<Real> arena) {
  __shared__ TileSums<Real> sums_of_warps[kTileWarps];
  const int64_t tile = int64_t{blockIdx.y} * kTileWarps + threadIdx.x / 32;
  if (tile >= arena.whole.tiles) return;
  TileSums<Real>& sums = sums_of_warps[threadIdx.x / 32];
  for_fours(arena.whole.tile, [&](int i) { sums.columns[i] = {}; });
  __syncwarp();
  const int64_t rows = (lists.rows + kBiasGroups - 1) / kBiasGroups, first = blockIdx.x * rows;
  for (int64_t row = first; row < min(first + rows, lists.rows); ++row) {
    add_row(sums, lists, arena, row, tile);
  }
  const int64_t first_column = tile * arena.whole.tile;
  const int columns = static_cast<int>(min(arena.whole.tile, lists.vocab - first_column));
  Real* out = arena.bias_sums + blockIdx.x * lists.vocab + first_column;
  for (int j = lane_of_thread(); j < columns; j += 32) out[j] = sums[j];
}

template <class Bias, class Real = RealOf<Bias>>
__global__ void __launch_bounds__(kThreads)
    whole_bias_kernel(const Real* bias_sums, int64_t vocab, Bias* d_bias) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= vocab) return;
  Real sum = 0;
#pragma unroll 8
  for (int64_t group = 0; group < kBiasGroups; ++group) sum += bias_sums[group * vocab + column];
  d_bias[column] = from_real<Bias>(sum);
}

}  // namespace

template <class Real>
void launch_pick_products(const CandidateLists& lists, const int32_t* column, int64_t first_row, int64_t rows,
                          const ConstMatrix& products, Real* picked, const Queue& queue) {
  queue.launch("pick_products", pick_products_kernel<Real>, static_cast<unsigned>(rows), kThreads, 0, lists,
               column, first_row, products, picked);
}

template <class Real>
void launch_spread(const Candidates& c, const CandidatesArenaOf<Real>& arena, int64_t first_tile,
                   int64_t tiles, const Matrix& dz, const Queue& queue) {
  const dim3 grid(static_cast<unsigned>(c.lists.rows), blocks_for(tiles, kTileWarps));
  for_dtype<Real>(dz.dtype, [&](auto element) {
    queue.launch("spread_candidates", spread_kernel<decltype(element)>, grid, kTileThreads, 0, c.lists, arena,
                 first_tile, tiles, static_cast<Real>(c.product_scale), dz);
  });
}

template <class Real>
void launch_whole_bias(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  const dim3 grid(static_cast<unsigned>(kBiasGroups), blocks_for(arena.whole.tiles, kTileWarps));
  queue.launch("candidate_bias_sums", bias_sums_kernel<Real>, grid, kTileThreads, 0, c.lists, arena);
  for_dtype<Real>(c.d_bias_dtype, [&](auto element) {
    using Bias = decltype(element);
    queue.launch("candidate_bias", whole_bias_kernel<Bias>, blocks_for(c.lists.vocab, kThreads), kThreads, 0,
                 arena.bias_sums, c.lists.vocab, static_cast<Bias*>(c.d_bias));
  });
}

#define LOGITLESS_INSTANTIATE(Real)                                                                \
  template void launch_pick_products(const CandidateLists&, const int32_t*, int64_t, int64_t,      \
                                     const ConstMatrix&, Real*, const Queue&);                     \
  template void launch_spread(const Candidates&, const CandidatesArenaOf<Real>&, int64_t, int64_t, \
                              const Matrix&, const Queue&);                                        \
  template void launch_whole_bias(const Candidates&, const CandidatesArenaOf<Real>&, const Queue&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
