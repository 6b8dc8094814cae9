#include "cuda/rows/vector8.cuh"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kInFlight = 2;  // pieces of 8 elements that a thread waits for at once

// Elements [i, i + 8) of a row of `columns`, of which some may not be there.
template <class T>
__device__ __forceinline__ Vector8<T> load_part(const T* row, int64_t i, int64_t columns) {
  Vector8<T> v;
#pragma unroll
  for (int k = 0; k < 8; ++k) v.x[k] = i + k >= 0 && i + k < columns ? row[i + k] : from_real<T>(0);
  return v;
}

// One warp a row, in pieces that begin at multiples of 16 bytes of the row that is written: only the first
// and the last of them may be parts, which are stored element by element.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) store_matrix_kernel(StoreMatrix s) {
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r >= s.rows) return;
  const From* from = static_cast<const From*>(s.from) + r * s.from_stride;
  const Extent readable = extent_of(static_cast<const From*>(s.from), s.rows, s.from_stride, s.columns);
  To* to = static_cast<To*>(s.to) + r * s.to_stride;
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(To));
  const auto whole = [&](int64_t i) { return i >= 0 && i + 8 <= s.columns; };
  for (int64_t begin = 8 * (threadIdx.x % 32) - past; begin < s.columns; begin += kInFlight * 8 * 32) {
    Pieces8<From> in[kInFlight];
    Vector8<To> old[kInFlight];
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {  // no load waits for another
      const int64_t i = begin + p * 8 * 32;
      in[p] = load_pieces8(from + i, whole(i) ? 8 : 0, readable);
      if (s.accumulate) old[p] = whole(i) ? load8<true>(to + i, 8) : load_part(to, i, s.columns);
    }
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int64_t i = begin + p * 8 * 32;
      const Vector8<From> sums = whole(i) ? elements8(in[p], 8) : load_part(from, i, s.columns);
      Vector8<To> out;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const RealOf<To> value = to_real(sums.x[k]);
        out.x[k] = from_real<To>(s.accumulate ? to_real(old[p].x[k]) + value : value);
      }
      if (whole(i)) {
        *reinterpret_cast<Vector8<To>*>(to + i) = out;
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (i + k >= 0 && i + k < s.columns) to[i + k] = out.x[k];
        }
      }
    }
  }
}

}  // namespace

void launch_store_matrix(const StoreMatrix& s, const Queue& queue) {
  if (s.rows == 0) return;
  for_any_dtypes(s.from_dtype, s.dtype, [&](auto from, auto to) {
    queue.launch(store_matrix_kernel<decltype(from), decltype(to)>, blocks_for(s.rows, kWarps), kThreads, 0,
                 s);
  });
  check_launch("store_matrix");
}

}  // namespace logitless::cuda
