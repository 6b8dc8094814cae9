#include <cuda_fp8.h>

#include "core/fp8.h"
#include "core/status.h"
#include "cuda/rows/row_copies.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kHeld = 4;  // pieces of 8 elements that a thread keeps between its two passes over a row
using Fp8 = __nv_fp8_storage_t;

// Two e4m3 numbers, `low` in the lower half. The conversion rounds as round_to_fp8() does, but saturates.
__device__ __forceinline__ uint32_t fp8_pair(float low, float high) {
  if (!(fabsf(low) <= kLargestFp8)) low = CUDART_NAN_F;
  if (!(fabsf(high) <= kLargestFp8)) high = CUDART_NAN_F;
  return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}

// Stores eight screened elements. scaled: divided by the row's factor.
__device__ __forceinline__ void store8(Fp8* to, const float (&scaled)[8], int) {
  *reinterpret_cast<uint2*>(to) = {fp8_pair(scaled[0], scaled[1]) | fp8_pair(scaled[2], scaled[3]) << 16,
                                   fp8_pair(scaled[4], scaled[5]) | fp8_pair(scaled[6], scaled[7]) << 16};
}
__device__ __forceinline__ void store8(__nv_bfloat16* to, const float (&scaled)[8], int exponent) {
  Vector8<__nv_bfloat16> v;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    v.x[k] = from_float<__nv_bfloat16>(round_to_fp8(scaled[k]) * power_of_two(exponent));
  }
  *reinterpret_cast<Vector8<__nv_bfloat16>*>(to) = v;
}

template <class From, class To>
__device__ __forceinline__ void store_screened(To* to, const Vector8<From>& v, int exponent) {
  float scaled[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) scaled[k] = to_float(v.x[k]) * power_of_two(-exponent);
  store8(to, scaled, exponent);
}

// NaN is no magnitude.
template <class T>
__device__ __forceinline__ float largest_of(float largest, const Vector8<T>& v) {
#pragma unroll
  for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(to_float(v.x[k])));
  return largest;
}

// `warps` warps of a block for each row. Pieces past the kHeld first ones of each thread are read twice, the
// second time from L2. kAligned: is_aligned8() of the rows.
template <class From, class To, bool kAligned>
__global__ void __launch_bounds__(kThreads) screen_rows_kernel(RowsCopy c, float* factor, int warps) {
  if (!holds(c.condition)) return;
  __shared__ float largest_of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, first_warp = warp / warps * warps;
  const int64_t r = int64_t{blockIdx.x} * (kWarps / warps) + warp / warps;
  const bool exists = r < c.rows && row_exists(c, r);
  const From* from = c.from.row<From>(!exists ? 0 : c.row_map != nullptr ? c.row_map[r] : r);
  const Extent readable = readable_of(c, from);
  const int64_t first = 8 * (static_cast<int>(threadIdx.x) - 32 * first_warp), step = 8 * 32 * warps;
  const int64_t columns = exists ? c.columns : 0;

  Loading8<kAligned, From> loading[kHeld];
#pragma unroll
  for (int p = 0; p < kHeld; ++p) {  // no load waits for another
    const int64_t i = first + p * step;
    loading[p] = start_load8<kAligned>(from + i, left_of(columns, i), readable);
  }
  Vector8<From> held[kHeld];
  float largest = 0;
#pragma unroll
  for (int p = 0; p < kHeld; ++p) {
    held[p] = end_load8(loading[p], left_of(columns, first + p * step));
    largest = largest_of(largest, held[p]);
  }
  const auto load = [&](int64_t i) {
    const int left = left_of(columns, i);
    return Vector8<From>{end_load8(start_load8<kAligned>(from + i, left, readable), left)};
  };
  for (int64_t i = first + kHeld * step; i < columns; i += step) largest = largest_of(largest, load(i));
  for (int by = 16; by > 0; by /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, by));
  if (threadIdx.x % 32 == 0) largest_of_warp[warp] = largest;
  __syncthreads();
  if (r >= c.rows) return;
  for (int w = first_warp; w < first_warp + warps; ++w) largest = fmaxf(largest, largest_of_warp[w]);

  const int exponent = fp8_row_exponent(largest);
  if (factor != nullptr && first == 0) factor[r] = power_of_two(exponent);
  To* to = c.to.row<To>(r);
#pragma unroll
  for (int p = 0; p < kHeld; ++p) {
    const int64_t i = first + p * step;
    if (i < c.padded) store_screened(to + i, held[p], exponent);
  }
  for (int64_t i = first + kHeld * step; i < c.padded; i += step) store_screened(to + i, load(i), exponent);
}

template <class To>
void launch(const RowsCopy& c, float* factor, const Queue& queue) {
  int warps = 1;
  while (warps < kWarps && 8 * 32 * kHeld * warps < c.padded) warps *= 2;
  for_dtype(c.from.dtype, [&](auto from) {
    using From = decltype(from);
    const auto kernel = is_aligned8(c.from, c.columns) ? screen_rows_kernel<From, To, true>
                                                       : screen_rows_kernel<From, To, false>;
    queue.launch("screen_rows", kernel, blocks_for(c.rows, kWarps / warps), kThreads, 0, c, factor, warps);
  });
}

}  // namespace

void launch_screen_rows(const RowsCopy& c, float* factor, const Queue& queue) {
  if (c.rows == 0) return;
  const bool is_fp8 = c.to.dtype == DType::kE4M3;
  if (is_fp8 != (factor != nullptr) || (!is_fp8 && c.to.dtype != DType::kBF16) || c.padded < c.columns ||
      c.from.dtype == DType::kF64) {
    throw Error(Status::kInternal, "screened rows: e4m3 with factors, or bf16, from another dtype");
  }
  const auto bytes = static_cast<uintptr_t>(size_of(c.to.dtype));
  const auto stride = static_cast<uintptr_t>(c.to.stride), padded = static_cast<uintptr_t>(c.padded);
  if (((reinterpret_cast<uintptr_t>(c.to.data) | stride * bytes | padded * bytes) & 15) != 0) {
    throw Error(Status::kInternal, "screened rows must begin and end at multiples of 16 bytes");
  }
  is_fp8 ? launch<Fp8>(c, factor, queue) : launch<__nv_bfloat16>(c, factor, queue);
}

}  // namespace logitless::cuda
