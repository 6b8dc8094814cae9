#include <algorithm>

#include "cuda/rows/gather8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kMostThreads = 512;
constexpr int kColumnsEach = 8;  // of a group of threads
constexpr int kInFlight = 8;     // hidden rows that a thread waits for at once
constexpr int kHeavyBlocks = 528;
// Slices of the hidden states' columns are done one after the other. The rows of a slice have at most so many
// bytes, so that they stay in L2 while all lists read them.
constexpr int64_t kSliceBytes = int64_t{24} << 20;

// A slice is 8 columns for each of a group's threads, which is a multiple of 32. A block has `groups` of
// them.
struct Slices {
  int threads, groups;
  unsigned count;

  Slices(int64_t columns, int64_t bytes) {
    const int64_t eights = (columns + 7) / 8;
    const int64_t least = (bytes + kSliceBytes - 1) / kSliceBytes;
    const int64_t wanted = std::max(least, (eights + kMostThreads - 1) / kMostThreads);
    const int64_t warps = std::max((eights + 32 * wanted - 1) / (32 * wanted), int64_t{1});
    threads = static_cast<int>(32 * warps);
    groups = kMostThreads / threads;
    count = static_cast<unsigned>((eights + threads - 1) / threads);
  }
  int block_threads() const { return groups * threads; }
};

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

// Lists that a group would be busy with long after the others. The more rows there are, the longer all take.
template <class Real>
__device__ int64_t longest_light(const GatherWeightOf<Real>& g) {
  return max(kHeavyColumn, g.rows / 64);
}

// Columns with many elements, 256 columns of a slice at a time, by all warps of a block.
template <class H, class To, Aligned kAligned, bool kSmooth>
__device__ void gather_heavy(const GatherWeightOf<RealOf<H>>& g, const Slices& slices) {
  __shared__ RealOf<H> parts[kMostThreads / 32][32][9];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int64_t pieces = slices.threads / 32;
  const int64_t items = *g.lists.heavy * pieces;
  for (int64_t item = blockIdx.x; item < items; item += kHeavyBlocks) {
    const int32_t j = g.lists.heavy[1 + item / pieces];
    if (g.lists.start[j + 1] - g.lists.start[j] <= longest_light(g)) continue;
    const int64_t column = (blockIdx.y * pieces + item % pieces) * 256 + lane * 8;
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

// The other columns: a group has a few of the vocabulary, a thread eight of the hidden ones.
template <class H, class To, Aligned kAligned, bool kSmooth>
__device__ void gather_light(const GatherWeightOf<RealOf<H>>& g, const Slices& slices) {
  const int group = static_cast<int>(threadIdx.x) / slices.threads;
  const int thread = static_cast<int>(threadIdx.x) % slices.threads;
  const int64_t column = (int64_t{blockIdx.y} * slices.threads + thread) * 8;
  if (column >= g.columns) return;
  const int left = static_cast<int>(min(g.columns - column, int64_t{8}));
  const H* hidden = g.hidden.template row<H>(0) + column;
  const int64_t first = ((int64_t{blockIdx.x} - kHeavyBlocks) * slices.groups + group) * kColumnsEach;
  const int64_t end = min(first + kColumnsEach, g.lists.columns);
  if (first >= end) return;
  int32_t start = g.lists.start[first];
  for (int64_t j = first; j < end; ++j) {
    const int32_t next = g.lists.start[j + 1];
    const bool is_light = next - start <= longest_light(g) && (next > start || !g.accumulate || kSmooth);
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
    gather_weight_kernel(GatherWeightOf<RealOf<H>> g, Slices slices) {
  if (blockIdx.x >= kHeavyBlocks) {
    gather_light<H, To, kAligned, kSmooth>(g, slices);
  } else {
    gather_heavy<H, To, kAligned, kSmooth>(g, slices);
  }
}

}  // namespace

template <class Real>
void launch_gather_weight(const GatherWeightOf<Real>& g, const Queue& queue) {
  const Slices slices(g.columns, g.rows * g.columns * static_cast<int64_t>(size_of(g.hidden.dtype)));
  const dim3 grid(kHeavyBlocks + blocks_for(g.lists.columns, slices.groups * kColumnsEach), slices.count);
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
        queue.launch("gather_weight", kernel, grid, slices.block_threads(), 0, g, slices);
      });
    });
  });
}

template void launch_gather_weight(const GatherWeightOf<float>&, const Queue&);
template void launch_gather_weight(const GatherWeightOf<double>&, const Queue&);

}  // namespace logitless::cuda
