#include <algorithm>

#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kInFlight = 4;            // pieces of 8 elements that a thread waits for at once
constexpr unsigned kLeastBlocks = 264;  // for the work that is not done row by row

// Stores elements [i, i + 8) of a row that ends at `end`.
template <class To, bool kAligned, class H>
__device__ __forceinline__ void store_operands(To* to, int64_t i, int64_t end, const Vector8<H>& from) {
  const Vector8<To> copy = converted<To>(from);
  if constexpr (kAligned) {
    if (i < end) *reinterpret_cast<Vector8<To>*>(to + i) = copy;
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (i + k < end) to[i + k] = copy.x[k];
    }
  }
}

// Copies a row with one warp, and multiplies it with its target's row of the weight on the way. The sum has
// the same order whether aligned or not, and uses unrounded numbers.
template <class H, class C, class To, bool kAligned, class Real>
__device__ void load_row(const LoadRows<Real>& l, int64_t r, bool exists, int lane) {
  To* to = l.to.data != nullptr ? l.to.template row<To>(r) : nullptr;
  if (!exists) {
    for (int64_t i = lane; to != nullptr && i < l.padded; i += 32) to[i] = from_real<To>(0);
    return;
  }
  const int32_t y = l.target_logit != nullptr ? l.target[r] : -1;
  const H* from = l.from.template row<H>(l.row_map[r]);
  const C* weight = l.weight.template row<C>(max(y, 0));
  const int64_t end = to != nullptr ? l.padded : y >= 0 ? l.columns : 0;
  Real sum = 0;
  for (int64_t first = 8 * lane; first < end; first += kInFlight * 8 * 32) {
    Loading8<kAligned, H> hidden_of[kInFlight];
    Loading8<kAligned, C> other_of[kInFlight];
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {  // no load waits for another
      const int64_t i = first + p * 8 * 32;
      const int left = static_cast<int>(min(l.columns - i, int64_t{8}));
      hidden_of[p] = start_load8<kAligned>(from + i, left, extent_of(from, l.columns));
      other_of[p] = start_load8<kAligned>(weight + i, y >= 0 ? left : 0, extent_of(weight, l.columns));
    }
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int left = static_cast<int>(min(l.columns - (first + p * 8 * 32), int64_t{8}));
      const Vector8<H> hidden = end_load8(hidden_of[p], left);
      if (y >= 0) {
        const Vector8<C> other = end_load8(other_of[p], left);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum = std::fma(to_real(hidden.x[k]), to_real(other.x[k]), sum);
      }
      if (to != nullptr) store_operands<To, kAligned>(to, first + p * 8 * 32, l.padded, hidden);
    }
  }
  if (l.target_logit == nullptr) return;
  sum = warp_sum(sum);
  if (lane != 0) return;
  Real z = 0;
  if (y >= 0) {
    const Real bias = l.bias != nullptr ? l.bias_scale * load_as<Real>(l.bias, l.bias_dtype, y) : Real(0);
    z = l.transform.logit(sum, bias, l.transform.inverse_temperature_of(r));
  }
  l.target_logit[r] = z;
  if (l.logit_offset != nullptr) l.logit_offset[r] = static_cast<float>(z);
}

template <class H, class C, class To, bool kAligned, class Real = RealOf<H>>
__global__ void __launch_bounds__(kThreads) load_rows_kernel(LoadRows<Real> l) {
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t count = existing(l.row_count, l.rows);
  if (l.from.data != nullptr && r < l.rows) {
    load_row<H, C, To, kAligned>(l, r, r < count, static_cast<int>(threadIdx.x) % 32);
  }
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x,
                threads = int64_t{gridDim.x} * kThreads;
  if (l.partials.sum != nullptr) {
    const int64_t end = l.partials.partials * l.partials.stride;
    for (int64_t i = thread; i < end; i += threads) clear_partial(l.partials, i);
  }
  if (l.bias_copy != nullptr) {
    for (int64_t j = thread; j < l.vocab; j += threads) {
      l.bias_copy[j] = l.bias_scale * load_as<Real>(l.bias, l.bias_dtype, j);
    }
  }
  if (l.tail != nullptr) {
    const int64_t end = l.rows * l.tail_pieces;
    for (int64_t i = count * l.tail_pieces + thread; i < end; i += threads) {
      static_cast<uint4*>(l.tail)[i] = uint4{};
    }
  }
}

template <class Real>
bool is_aligned(const LoadRows<Real>& l) {
  return is_aligned8(l.from, l.columns) && (l.target_logit == nullptr || is_aligned8(l.weight, l.columns)) &&
         (l.to.data == nullptr || is_aligned8(l.to, l.padded));
}

}  // namespace

template <class Real>
void launch_load_rows(const LoadRows<Real>& l, const Queue& queue) {
  const unsigned blocks = std::max(blocks_for(l.rows, kWarps), kLeastBlocks);
  const bool aligned = is_aligned(l);
  for_dtype<Real>(l.from.dtype, [&](auto h) {
    for_dtype<Real>(l.weight.dtype, [&](auto c) {
      for_dtype<Real>(l.to.dtype, [&](auto to) {
        using H = decltype(h);
        using C = decltype(c);
        using To = decltype(to);
        const auto kernel = aligned ? load_rows_kernel<H, C, To, true> : load_rows_kernel<H, C, To, false>;
        queue.launch("load_rows", kernel, blocks, kThreads, 0, l);
      });
    });
  });
}
template void launch_load_rows(const LoadRows<float>&, const Queue&);
template void launch_load_rows(const LoadRows<double>&, const Queue&);

}  // namespace logitless::cuda
