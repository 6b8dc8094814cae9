#include "cuda/rows/gather8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kMostThreads = 512;
constexpr int kColumnsEach = 8;  // of a block of threads
constexpr int kInFlight = 8;     // hidden rows that a thread waits for at once
constexpr int kHeavyBlocks = 528;
// A part of the hidden states that stays in L2 while all lists read it.
constexpr int64_t kSliceBytes = int64_t{40} << 20;

// The matrices whose rows are whole vectors of 8 elements at multiples of 16 bytes. Hidden rows may be
// although the destination's are not, because copies of them are padded.
enum class Aligned { kNone, kHidden, kBoth };

// Adds the sum over list[begin], list[begin + step], ...
template <bool kAligned, class H, class Real = RealOf<H>>
__device__ __forceinline__ void add_list(Real (&sum)[8], const GatherWeightOf<Real>& g, const H* hidden,
                                         int begin, int end, int step, int left) {
  int i = begin;
  for (; i + (kInFlight - 1) * step < end; i += kInFlight * step) {
    Vector8<H> rows[kInFlight];
    Real values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const KeptRowOf<Real> element = g.lists.elements[i + k * step];
      values[k] = element.value;
      rows[k] = load8<kAligned>(hidden + element.row * g.hidden.stride, left);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) add8(sum, rows[k], values[k], g.operand_dtype);
  }
  for (; i < end; i += step) {
    add8(sum, load8<kAligned>(hidden + g.lists.elements[i].row * g.hidden.stride, left),
         g.lists.elements[i].value, g.operand_dtype);
  }
}

// Columns with many elements, 256 hidden columns at a time, by all warps of a block.
template <class H, class To, Aligned kAligned, bool kSmooth>
__device__ void gather_heavy(const GatherWeightOf<RealOf<H>>& g, int block, int blocks) {
  __shared__ RealOf<H> parts[kMostThreads / 32][32][9];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int64_t pieces = (g.columns + 255) / 256;
  const int64_t items = *g.lists.heavy * pieces;
  for (int64_t item = block; item < items; item += blocks) {
    const int32_t j = g.lists.heavy[1 + item / pieces];
    const int64_t column = item % pieces * 256 + lane * 8;
    const int left = static_cast<int>(min(g.columns - column, int64_t{8}));
    RealOf<H> sum[8] = {};
    if (left > 0) {
      add_list<kAligned != Aligned::kNone>(sum, g, g.hidden.template row<H>(0) + column,
                                           g.lists.start[j] + warp, g.lists.start[j + 1], warps, left);
    }
    for (int i = 0; i < 8; ++i) parts[warp][lane][i] = sum[i];
    __syncthreads();
    if (warp == 0 && left > 0) {
      for (int k = 1; k < warps; ++k) {
        for (int i = 0; i < 8; ++i) sum[i] += parts[k][lane][i];
      }
      if constexpr (kSmooth) smooth8(sum, g.smoothing, j, column, left);
      store8<kAligned == Aligned::kBoth>(g.to.template row<To>(j) + column, sum, left, g.accumulate);
    }
    __syncthreads();
  }
}

// The other columns: a block has a few of the vocabulary, a thread eight of the hidden ones.
template <class H, class To, Aligned kAligned, bool kSmooth>
__device__ void gather_light(const GatherWeightOf<RealOf<H>>& g, int64_t block) {
  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * 8;
  if (column >= g.columns) return;
  const int left = static_cast<int>(min(g.columns - column, int64_t{8}));
  const H* hidden = g.hidden.template row<H>(0) + column;
  const int64_t first = block * kColumnsEach, end = min(first + kColumnsEach, g.lists.columns);
  int32_t start = g.lists.start[first];
  for (int64_t j = first; j < end; ++j) {
    const int32_t next = g.lists.start[j + 1];
    const bool is_light = next - start <= kHeavyColumn && (next > start || !g.accumulate || kSmooth);
    if (is_light && (g.lists.role == nullptr || g.lists.role[j] < 0)) {
      RealOf<H> sum[8] = {};
      add_list<kAligned != Aligned::kNone>(sum, g, hidden, start, next, 1, left);
      if constexpr (kSmooth) smooth8(sum, g.smoothing, j, column, left);
      store8<kAligned == Aligned::kBoth>(g.to.template row<To>(j) + column, sum, left, g.accumulate);
    }
    start = next;
  }
}

// The first blocks to start have the long lists; the others fill the processors while those end.
template <class H, class To, Aligned kAligned, bool kSmooth>
__global__ void __launch_bounds__(kMostThreads, kAligned != Aligned::kNone && sizeof(H) == 2 ? 2 : 1)
    gather_weight_kernel(GatherWeightOf<RealOf<H>> g) {
  if (blockIdx.x >= kHeavyBlocks) {
    gather_light<H, To, kAligned, kSmooth>(g, int64_t{blockIdx.x} - kHeavyBlocks);
  } else if (blockIdx.y == 0) {
    gather_heavy<H, To, kAligned, kSmooth>(g, static_cast<int>(blockIdx.x), kHeavyBlocks);
  }
}

}  // namespace

template <class Real>
void launch_gather_weight(const GatherWeightOf<Real>& g, const Queue& queue) {
  const int64_t bytes = g.rows * kMostThreads * 8 * static_cast<int64_t>(size_of(g.hidden.dtype));
  const RowBlocks blocks = row_threads(g.columns, bytes > kSliceBytes ? kMostThreads / 2 : kMostThreads);
  const dim3 grid(kHeavyBlocks + blocks_for(g.lists.columns, kColumnsEach), blocks.blocks);
  const bool from = is_aligned8(g.hidden, g.padded);
  const bool to = is_aligned8(g.to, g.columns);
  for_dtype<Real>(g.hidden.dtype, [&](auto h) {
    for_dtype<Real>(g.to.dtype, [&](auto t) {
      using H = decltype(h);
      using To = decltype(t);
      for_gather<Real>(to, g.smoothing.sum != nullptr, [&](auto is_to, auto is_smooth) {
        constexpr Aligned kRows = is_to.value ? Aligned::kBoth : Aligned::kHidden;
        const auto kernel = from ? gather_weight_kernel<H, To, kRows, is_smooth.value>
                                 : gather_weight_kernel<H, To, Aligned::kNone, is_smooth.value>;
        queue.launch("gather_weight", kernel, grid, blocks.threads, 0, g);
      });
    });
  });
}

template void launch_gather_weight(const GatherWeightOf<float>&, const Queue&);
template void launch_gather_weight(const GatherWeightOf<double>&, const Queue&);

}  // namespace logitless::cuda
