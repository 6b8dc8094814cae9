#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kInFlight = 2;  // pieces of 8 elements that a thread waits for at once

// Loads elements [i, i + 8) of a row of `columns`; those outside of the row become 0.
template <class T>
__device__ __forceinline__ Vector8<T> load_part(const T* row, int64_t i, int64_t columns) {
  Vector8<T> v;
#pragma unroll
  for (int k = 0; k < 8; ++k) v.x[k] = i + k >= 0 && i + k < columns ? row[i + k] : from_real<T>(0);
  return v;
}

// One warp for each row. Pieces begin at multiples of 16 bytes of the destination row. Only the first and the
// last piece may be partial; they are stored element by element.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    store_matrix_kernel(ConstMatrix source, Matrix target, int64_t rows, int64_t columns, bool accumulate) {
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r >= rows) return;
  const From* from = source.row<From>(r);
  const Extent readable = extent_of<From>(source, rows, columns);
  To* to = target.row<To>(r);
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % 16 / sizeof(To));
  const auto whole = [&](int64_t i) { return i >= 0 && i + 8 <= columns; };
  for (int64_t begin = 8 * (threadIdx.x % 32) - past; begin < columns; begin += kInFlight * 8 * 32) {
    Pieces8<From> in[kInFlight];
    Vector8<To> old[kInFlight];
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {  // no load waits for another
      const int64_t i = begin + p * 8 * 32;
      in[p] = load_pieces8(from + i, whole(i) ? 8 : 0, readable);
      if (accumulate) old[p] = whole(i) ? load8<true>(to + i, 8) : load_part(to, i, columns);
    }
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int64_t i = begin + p * 8 * 32;
      const Vector8<From> sums = whole(i) ? elements8(in[p], 8) : load_part(from, i, columns);
      Vector8<To> out;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const RealOf<To> value = to_real(sums.x[k]);
        out.x[k] = from_real<To>(accumulate ? to_real(old[p].x[k]) + value : value);
      }
      if (whole(i)) {
        *reinterpret_cast<Vector8<To>*>(to + i) = out;
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (i + k >= 0 && i + k < columns) to[i + k] = out.x[k];
        }
      }
    }
  }
}

}  // namespace

void launch_store_matrix(const ConstMatrix& from, const Matrix& to, int64_t rows, int64_t columns,
                         bool accumulate, const Queue& queue) {
  if (rows == 0) return;
  for_any_dtypes(from.dtype, to.dtype, [&](auto source, auto target) {
    queue.launch("store_matrix", store_matrix_kernel<decltype(source), decltype(target)>,
                 blocks_for(rows, kWarps), kThreads, 0, from, to, rows, columns, accumulate);
  });
}

}  // namespace logitless::cuda
