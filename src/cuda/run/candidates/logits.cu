#include "cuda/rows/vector8.cuh"
#include "cuda/run/candidates/candidates.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class Real>
struct Products {
  CandidateLists lists;
  ConstMatrix hidden, weight;
  int64_t columns;  // of hidden states
  DType operand_dtype;
  const int32_t* column;  // as CandidatesArenaOf
  const int32_t* unit_row;
  Real* partial;
  bool hidden_is_aligned;  // as is_aligned8() says
  int64_t first_slice;
  bool adds;  // to the sums of earlier slices
};

// Rows of the weight that a thread waits for at once, in vectors of 8 elements.
template <class C, bool kAligned>
constexpr int kInFlight = sizeof(C) == 8 ? (kAligned ? 4 : 2) : (kAligned ? 8 : 4);

// Adds up each of kCount values over kLanes threads. A thread gets the sum of number (its place) / (kLanes /
// kCount).
template <int kCount, int kLanes, class Real>
__device__ __forceinline__ Real sum_each(Real (&values)[kCount], int place) {
  if constexpr (kCount == 1) {
    Real sum = values[0];
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  } else {
    constexpr int kStep = kLanes / 2, kHalf = kCount / 2;
    const bool upper = (place & kStep) != 0;
    Real half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const Real keep = upper ? values[i + kHalf] : values[i], give = upper ? values[i] : values[i + kHalf];
      half[i] = keep + __shfl_xor_sync(~0u, give, kStep);
    }
    return sum_each<kHalf, kLanes / 2>(half, place);
  }
}

// Eight elements of a row of hidden states, whose dtype only the running kernel knows.
template <class Real>
__device__ __forceinline__ void load_hidden(const Products<Real>& p, int64_t row, int64_t column, Real* to) {
  const int left = static_cast<int>(max(int64_t{0}, min(p.columns - column, int64_t{8})));
  const auto load = [&](auto element) {
    using H = decltype(element);
    const H* from = p.hidden.template row<H>(row) + column;
    const Vector8<H> x = p.hidden_is_aligned && left > 0 ? load8<true>(from, left) : load8<false>(from, left);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = to_operand(x.x[i], p.operand_dtype);
  };
  if constexpr (std::is_same_v<Real, double>) {
    load(double{});
  } else if (p.hidden.dtype == DType::kBF16) {
    load(__nv_bfloat16{});
  } else if (p.hidden.dtype == DType::kF16) {
    load(__half{});
  } else {
    load(float{});
  }
}

// One warp for each unit of elements and slice of the hidden size. It holds a row's slice, and several
// candidates at once wait for theirs: kLanes threads for each, and each thread has kVectors vectors.
template <class C, int kLanes, int kVectors, bool kAligned, class Real = RealOf<C>>
__global__ void __launch_bounds__(kThreads, 2) products_kernel(const __grid_constant__ Products<Real> p) {
  constexpr int kGroups = 32 / kLanes, kAtOnce = kInFlight<C, kAligned> / kVectors;
  static_assert(kAtOnce >= 1 && kLanes >= kAtOnce);
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / kLanes, place = lane % kLanes;
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, first = unit * kUnit;
  if (first >= p.lists.elements) return;
  const int64_t slice = p.first_slice + blockIdx.y;
  const int64_t column = slice * (8 * kLanes * kVectors) + 8 * place;
  const int count = static_cast<int>(min(int64_t{kUnit}, p.lists.elements - first));
  const int32_t own = lane < count ? p.column[first + lane] : kNoElement;
  const Extent readable = extent_of<C>(p.weight, p.lists.vocab, p.columns);
  Real* out = p.partial + int64_t{blockIdx.y} * p.lists.elements + first;
  int64_t row = p.unit_row[unit];
  for (int at = 0; at < count;) {
    if (at > 0) row = p.lists.row_of(first + at);
    // Wrong offsets may say anything, but each turn takes an element, and rows end at count.
    const int64_t next = row + 1 < p.lists.rows ? p.lists.begin(row + 1) - first : count;
    const int end = next > at && next < count ? static_cast<int>(next) : count;
    Real hidden[kVectors][8];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_hidden(p, row, column + v * 8 * kLanes, hidden[v]);
    for (int base = at; base < end; base += kGroups * kAtOnce) {
      Loading8<kAligned, C> rows[kAtOnce][kVectors];
      Real sums[kAtOnce];
      bool exists[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = base + group + k * kGroups;
        const int32_t j = __shfl_sync(~0u, own, i % 32);
        exists[k] = i < end && j >= 0;
        const C* weight = p.weight.template row<C>(exists[k] ? j : 0) + column;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int64_t left = exists[k] ? min(p.columns - column - v * 8 * kLanes, int64_t{8}) : 0;
          rows[k][v] = start_load8<kAligned>(weight + v * 8 * kLanes, static_cast<int>(left), readable);
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        sums[k] = 0;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const int64_t left = exists[k] ? min(p.columns - column - v * 8 * kLanes, int64_t{8}) : 0;
          const Vector8<C>& x = end_load8(rows[k][v], static_cast<int>(left));
#pragma unroll
          for (int d = 0; d < 8; ++d) {
            sums[k] = std::fma(to_operand(x.x[d], p.operand_dtype), hidden[v][d], sums[k]);
          }
        }
      }
      const Real sum = sum_each<kAtOnce, kLanes>(sums, place);
      constexpr int kShare = kLanes / kAtOnce;
      const int i = base + group + place / kShare * kGroups;
      if (place % kShare == 0 && i < end) out[i] = (p.adds ? out[i] : Real(0)) + sum;
    }
    at = end;
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    logits_kernel(const __grid_constant__ Candidates c, CandidatesArenaOf<Real> arena) {
  const int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e == 0 && c.invalid_ids != nullptr) {
    const WrongLists wrong = *arena.wrong;
    const bool all = wrong.offsets != 0 && c.lists.elements > 0;
    c.invalid_ids[0] = all ? c.lists.elements : wrong.ids;
    c.invalid_ids[1] = all ? 0 : wrong.ids > 0 ? c.lists.elements - wrong.from_last : -1;
  }
  if (e >= c.lists.elements) return;
  Real* out = static_cast<Real*>(c.logits) + e;
  const int32_t column = arena.column[e];
  if (arena.wrong->offsets != 0 || column == kInvalidElement) {
    *out = static_cast<Real>(CUDART_NAN);
    return;
  }
  if (column == kNoElement) {
    *out = -std::numeric_limits<Real>::infinity();
    return;
  }
  Real dot = 0;
  for (int64_t s = 0; s < arena.slices.at_once; ++s) dot += arena.partial[s * c.lists.elements + e];
  const Real bias = c.bias != nullptr ? load_as<Real>(c.bias, c.bias_dtype, column) : Real(0);
  const Real of_row =
      c.row_temperature != nullptr
          ? inverse_temperature(static_cast<const Real*>(c.row_temperature)[c.lists.row_of(e)])
          : Real(1);
  *out = c.factors.logit(dot, bias, of_row);
}

template <class C, int kLanes, int kVectors, class Real>
void launch_slices(const Products<Real>& p, int64_t slices, bool aligned, const Queue& queue) {
  const int64_t units = (p.lists.elements + kUnit - 1) / kUnit;
  const dim3 grid(blocks_for(units, kWarps), static_cast<unsigned>(slices));
  const auto kernel =
      aligned ? products_kernel<C, kLanes, kVectors, true> : products_kernel<C, kLanes, kVectors, false>;
  queue.launch("candidate_products", kernel, grid, kThreads, 0, p);
}

}  // namespace

template <class Real>
void launch_products(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  const ProductSlices& slices = arena.slices;
  Products<Real> p{
      .lists = c.lists,
      .hidden = {c.hidden, c.hidden_dtype, c.hidden_stride},
      .weight = {c.weight, c.weight_dtype, c.weight_stride},
      .columns = c.hidden_size,
      .operand_dtype = c.compute_dtype,
      .column = arena.column,
      .unit_row = arena.unit_row,
      .partial = arena.partial,
      .hidden_is_aligned = is_aligned8({c.hidden, c.hidden_dtype, c.hidden_stride}, c.hidden_size)};
  const bool aligned = is_aligned8(p.weight, p.columns);
  for (int64_t s = 0; s < slices.count; s += slices.at_once) {
    p.first_slice = s;
    p.adds = s > 0;
    const int64_t count = std::min(slices.at_once, slices.count - s);
    for_dtype<Real>(c.weight_dtype, [&](auto element) {
      using C = decltype(element);
      if (slices.lanes == 8) {
        launch_slices<C, 8, 1>(p, count, aligned, queue);
      } else if (slices.lanes == 16) {
        launch_slices<C, 16, 1>(p, count, aligned, queue);
      } else {
        launch_slices<C, 32, sizeof(C) == 8 ? 2 : 4>(p, count, aligned, queue);
      }
    });
  }
}

template <class Real>
void launch_candidate_logits(const Candidates& c, const CandidatesArenaOf<Real>& arena, const Queue& queue) {
  queue.launch("candidate_logits", logits_kernel<Real>, blocks_for(c.lists.elements, kThreads), kThreads, 0,
               c, arena);
}

#define LOGITLESS_INSTANTIATE(Real)                                                               \
  template void launch_products(const Candidates&, const CandidatesArenaOf<Real>&, const Queue&); \
  template void launch_candidate_logits(const Candidates&, const CandidatesArenaOf<Real>&, const Queue&);
LOGITLESS_INSTANTIATE(float)
LOGITLESS_INSTANTIATE(double)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cuda
