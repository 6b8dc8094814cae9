#include "cuda/rows/row_copies.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kInFlight = 4;  // pieces of 8 elements that a thread waits for at once

template <class To>
__device__ __forceinline__ void store8_anywhere(To* to, int64_t left, const Vector8<To>& v) {
  if (left >= 8 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<Vector8<To>*>(to) = v;
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (k < left) to[k] = v.x[k];
  }
}

// One warp for each row. kAligned: rows consist of whole vectors of 8 elements that begin at multiples of 16
// bytes.
template <class From, class To, bool kAligned>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(RowsCopy c) {
  if (!holds(c.condition)) return;
  const int64_t r = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r >= c.rows) return;
  To* to = c.to.row<To>(r);
  const bool exists = row_exists(c, r);
  const int64_t row = exists && c.row_map != nullptr ? c.row_map[r] : r;
  const From* from = c.from.row<From>(row);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t first = 8 * lane; first < c.padded; first += kInFlight * 8 * 32) {
    Loading8<kAligned, From> in[kInFlight];
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {  // no load waits for another
      const int64_t i = first + p * 8 * 32;
      const int left = exists ? left_of(c.columns, i) : 0;
      if constexpr (kAligned) {
        in[p] = left > 0 ? load8_once(from + i) : Vector8<From>{};
      } else {
        in[p] = load_pieces8(from + i, left, readable_of(c, from));
      }
    }
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int64_t i = first + p * 8 * 32;
      const Vector8<To> out = converted<To>(end_load8(in[p], exists ? left_of(c.columns, i) : 0));
      if constexpr (kAligned) {
        if (i < c.columns) *reinterpret_cast<Vector8<To>*>(to + i) = out;
      } else {
        store8_anywhere(to + i, c.padded - i, out);
      }
    }
  }
}

template <class T>
__global__ void scale_rows_kernel(ScaleRows s) {
  const int64_t r = blockIdx.x;
  const bool exists = r < existing(s.row_count, s.rows);
  const float factor = exists ? s.factor[r] * (s.common != nullptr ? *s.common : 1.0f) : 0;
  T* row = s.matrix.row<T>(r);
  for (int64_t i = threadIdx.x; i < s.columns; i += blockDim.x) {
    row[i] = exists ? from_float<T>(to_float(row[i]) * factor) : from_float<T>(0);
  }
}

}  // namespace

void launch_copy_rows(const RowsCopy& c, const Queue& queue) {
  if (c.rows == 0) return;
  const unsigned blocks = blocks_for(c.rows, kWarps);
  const bool aligned =
      c.columns == c.padded && is_aligned8(c.from, c.columns) && is_aligned8(c.to, c.columns);
  for_any_dtypes(c.from.dtype, c.to.dtype, [&](auto from, auto to) {
    using From = decltype(from);
    using To = decltype(to);
    const auto kernel = aligned ? copy_rows_kernel<From, To, true> : copy_rows_kernel<From, To, false>;
    queue.launch("copy_rows", kernel, blocks, kThreads, 0, c);
  });
}

void launch_scale_rows(const ScaleRows& s, const Queue& queue) {
  for_dtype(s.matrix.dtype, [&](auto type) {
    queue.launch("scale_rows", scale_rows_kernel<decltype(type)>, static_cast<unsigned>(s.rows), kThreads, 0,
                 s);
  });
}

}  // namespace logitless::cuda
