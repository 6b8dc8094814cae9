#pragma once
// Functions that several row kernels share.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include <limits>
#include <type_traits>

#include "core/row_coefficients.h"
#include "cuda/rows/exp2.cuh"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/rows.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
template <class T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

// The type of computation with such elements: float, or double for float64.
template <class T>
using RealOf = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
__device__ inline RealOf<T> to_real(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return to_float(x);
  }
}
template <class T>
__device__ inline T from_real(RealOf<T> x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return from_float<T>(x);
  }
}

// An operand's element as products see it: rounded to their dtype, which may be another one of 16 bits.
template <class T>
__device__ inline RealOf<T> as_operand(T x, DType dtype) {
  const RealOf<T> number = to_real(x);
  if constexpr (!std::is_same_v<T, double>) {
    if (dtype == DType::kBF16) return to_float(from_float<__nv_bfloat16>(number));
    if (dtype == DType::kF16) return to_float(from_float<__half>(number));
  }
  return number;
}
// As that for fp32, while elements of 16 bits stay. A look at the dtype costs a gather of these up to a
// quarter of its time.
template <class T>
__device__ inline RealOf<T> to_operand(T x, DType dtype) {
  if constexpr (std::is_same_v<T, float>) {
    return as_operand(x, dtype);
  } else {
    return to_real(x);
  }
}

// Calls f(T{}) for the element type of a dtype, which is float64 if and only if Real is double.
template <class Real = float, class F>
void for_dtype(DType dtype, F&& f) {
  if constexpr (std::is_same_v<Real, double>) {
    f(double{});
  } else if (dtype == DType::kBF16) {
    f(__nv_bfloat16{});
  } else if (dtype == DType::kF16) {
    f(__half{});
  } else {
    f(float{});
  }
}

// Calls f for any dtype, or for two dtypes that are both float64 or neither.
template <class F>
void for_any_dtype(DType dtype, F&& f) {
  dtype == DType::kF64 ? for_dtype<double>(dtype, f) : for_dtype(dtype, f);
}
template <class F>
void for_any_dtypes(DType first, DType second, F&& f) {
  if (first == DType::kF64) return f(double{}, double{});
  for_dtype(first, [&](auto x) { for_dtype(second, [&](auto y) { f(x, y); }); });
}

// Loads an element of a dtype that only the running kernel knows. It is float64 if and only if Real is
// double.
template <class Real>
__device__ inline Real load_as(const void* data, DType dtype, int64_t i) {
  if constexpr (std::is_same_v<Real, double>) return static_cast<const double*>(data)[i];
  if (dtype == DType::kBF16) return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
  if (dtype == DType::kF16) return to_float(static_cast<const __half*>(data)[i]);
  return static_cast<const float*>(data)[i];
}

// T: the dtype of statistics.
template <class T>
__device__ inline void store_if(void* data, int64_t row, double value) {
  if (data != nullptr) static_cast<T*>(data)[row] = static_cast<T>(value);
}

// Stores 0 or 1; a NaN gives 0.
template <class T>
__device__ inline void store_if(uint8_t* data, int64_t row, double value) {
  if (data != nullptr) data[row] = value > 0;
}

// Stores the row's statistics that have buffers.
template <class T>
__device__ inline void store_stats(const Buffers& out, int64_t row, const RowStats<double>& stats) {
  store_if<T>(out.max, row, stats.max);
#define LOGITLESS_STORE(name, part, kind, ...) \
  store_if<T>(out.name, row, plain_sum(SumKind::kind, stats.part, stats));
  LOGITLESS_ROW_SUMS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
  if (out.argmax != nullptr) out.argmax[row] = stats.argmax;
}

// The global target of a caller's row after the shift, or ignore_index.
__device__ inline int64_t target_of(const RowTargets& in, int64_t row) {
  int64_t at = row;
  if (in.shift != 0) {
    const int64_t position = row % in.sequence_length + in.shift;
    if (position >= in.sequence_length) return in.ignore_index;
    at += in.shift;
  }
  if (in.targets == nullptr) return 0;  // where rows are only sampled from
  return in.wide_targets ? static_cast<const int64_t*>(in.targets)[at]
                         : int64_t{static_cast<const int32_t*>(in.targets)[at]};
}

// An element of `row_targets`.
__device__ inline int64_t target_at(const RowTargets& in, int64_t at) {
  if (in.row_targets == nullptr) return 0;
  return in.wide_row_targets ? static_cast<const int64_t*>(in.row_targets)[at]
                             : int64_t{static_cast<const int32_t*>(in.row_targets)[at]};
}

// The k-th of several targets of a caller's row that is not ignored, or ignore_index; and its weight.
__device__ inline int64_t target_of(const RowTargets& in, int64_t row, int64_t k) {
  return target_at(in, (row + in.shift) * in.targets_per_row + k);
}
template <class Real>
__device__ inline double target_weight_of(const RowInputsOf<Real>& in, int64_t row, int64_t k) {
  const Real* weight = in.target_weight;
  return weight != nullptr ? double{weight[(row + in.shift) * in.targets_per_row + k]} : 1;
}

__device__ inline bool in_range(const RowTargets& in, int64_t target) {
  return target >= 0 && target < in.vocab_total;
}

// Whether a target is one of the shard's columns, and not ignore_index.
__device__ inline bool is_here(const RowTargets& in, int64_t target) {
  const int64_t column = target - in.vocab_start;
  return target != in.ignore_index && column >= 0 && column < in.vocab;
}

// Stores the outputs of a row that is not computed: 0, or NaN if the target is out of range.
template <class T>
__device__ inline void store_ignored(const RowTargets& in, const Buffers& out, int64_t row, bool is_invalid) {
  const double value = is_invalid ? CUDART_NAN : 0;
  RowStats<double> none;
  none.target_logit = value;
  store_stats<T>(out, row, none);
#define LOGITLESS_STORE(name, ...) store_if<T>(out.name, row, value);
  LOGITLESS_ROW_OUTPUTS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
  store_if<T>(out.lse_residual, row, 0);
  if (in.is_none) store_if<T>(out.loss, row, value);
  for (int64_t at = row * in.top_k; at < (row + 1) * in.top_k; ++at) {
    if (out.top_ids != nullptr) out.top_ids[at] = -1;
    store_if<T>(out.top_log_probs, at, value);
  }
  for (int64_t at = row * in.num_samples; at < (row + 1) * in.num_samples; ++at) {
    if (out.sampled_ids != nullptr) out.sampled_ids[at] = -1;
    store_if<T>(out.sampled_keys, at, -CUDART_INF);
    store_if<T>(out.sampled_logits, at, value);
    store_if<T>(out.sampled_log_probs, at, value);
  }
  for (int64_t at = row * in.targets_per_row; at < (row + 1) * in.targets_per_row; ++at) {
    store_if<T>(out.target_log_probs, at, value);
  }
}

template <class Real>
__device__ inline RowWeights<double> weights_of(const RowInputsOf<Real>& in, int64_t row, int64_t target) {
  RowWeights<double> w;
  if (in.token_weight != nullptr) w.token = in.token_weight[row];
  if (in.class_weight != nullptr) w.target = in.class_weight[target];
  if (in.targets_per_row > 0) w.target_sum = in.target_weight_sum[row + in.shift];
  return w;
}

template <class Scalars>
__device__ inline LossParams<double> known_loss(const RowTargets& in, const Scalars& scalars) {
  LossParams<double> loss = in.loss;
  loss.class_weight_sum = scalars.class_weight_sum;
  return loss;
}

__device__ inline int64_t existing(const int32_t* row_count, int64_t rows) {
  return row_count == nullptr ? rows : min(static_cast<int64_t>(*row_count), rows);
}

// Loads statistics of a row from a partial. `weighted` is relative to 0, because no partial has the sum of
// the class weights of its columns.
template <class T = double, class Real>
__device__ inline RowStats<T> stats_of_partial(const PartialStatsOf<Real>& partials, int64_t s, int64_t r) {
  const int64_t at = s * partials.stride + r;
  RowStats<T> one;
  if (partials.max != nullptr) one.max = partials.max[at];
  one.sum_exp = partials.sum[at];
#define LOGITLESS_SUM(name, part, ...) \
  if (partials.part != nullptr) one.part = partials.part[at];
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  if (partials.argmax != nullptr) one.argmax = partials.argmax[at];
  return one;
}

// Writes all statistics except the argmax to a partial.
template <class Real, class T>
__device__ inline void store_partial(const PartialStatsOf<Real>& partials, int64_t at,
                                     const RowStats<T>& stats) {
  if (partials.max != nullptr) partials.max[at] = static_cast<Real>(stats.max);
  partials.sum[at] = static_cast<Real>(stats.sum_exp);
#define LOGITLESS_STORE(name, part, ...) \
  if (partials.part != nullptr) partials.part[at] = static_cast<Real>(stats.part);
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
}

// Statistics of a row from its partials, in the order of the partials.
template <class Real>
__device__ inline RowStats<double> joined(const PartialStatsOf<Real>& partials, int64_t r) {
  RowStats<double> all;
  for (int64_t s = 0; s < partials.partials; ++s) all = merge(all, stats_of_partial(partials, s, r));
  return all;
}

// A row's sum over the partials, in their order. Loads do not wait for one another.
template <class Real>
__device__ inline double sum_of_partials(const PartialStatsOf<Real>& partials, const Real* values,
                                         int64_t r) {
  double sum = 0;
#pragma unroll 8
  for (int64_t s = 0; s < partials.partials; ++s) sum += values[s * partials.stride + r];
  return sum;
}

// exp(z - logit_offset), as the portable engine computes it.
__device__ inline float exp_from(float z, float logit_offset) {
  return exp2_approx((z - logit_offset) * kLog2E);
}
__device__ inline double exp_from(double z, double logit_offset) {
  return std::exp(z - logit_offset);
}

// exp(z - logit_offset) for logits far above the offset, where the roundings of the difference and of its
// product with log2(e) count.
__device__ inline float exp_from_far(float z, float logit_offset) {
  constexpr float kLog2ELow = 1.925963e-8f;  // log2(e) - kLog2E
  const float d = z - logit_offset, part = d - z;
  if (d < 1) return exp_from(z, logit_offset);
  const float lost = (z - (d - part)) - (logit_offset + part);  // d + lost is exact
  const float t = d * kLog2E;
  const float rest = std::fma(d, kLog2E, -t) + std::fma(d, kLog2ELow, lost * kLog2E);
  const float y = exp2_approx(t);
  return std::fma(y, rest * kLn2, y);
}

// Narrows a range so that fp32 also holds the optional sums.
LOGITLESS_HD inline SumRange range_of_sums(const PartialStats& partials, SumRange range) {
#define LOGITLESS_RANGE(name, part, kind, ...)                                                          \
  if (partials.part != nullptr && SumKind::kind == SumKind::kExpOffset && range.most > 0x1p100) {       \
    range.most = 0x1p100; /* differences up to 2^27 */                                                  \
  }                                                                                                     \
  if (partials.part != nullptr && SumKind::kind == SumKind::kSquaredExp) {                              \
    range.most = range.most < 0x1p60 ? range.most : 0x1p60;                                             \
    range.least = range.least > 0x1p-28 ? range.least : 0x1p-28; /* squares of 2^20 equal exp_logits */ \
  }
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_RANGE)
#undef LOGITLESS_RANGE
  return range;
}

// Resets an element of the partials to the statistics of no column.
template <class Real>
__device__ inline void clear_partial(const PartialStatsOf<Real>& partials, int64_t i) {
  partials.max[i] = -std::numeric_limits<Real>::infinity();
  partials.sum[i] = 0;
#define LOGITLESS_CLEAR(name, part, ...) \
  if (partials.part != nullptr) partials.part[i] = 0;
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_CLEAR)
#undef LOGITLESS_CLEAR
  if (partials.argmax != nullptr) partials.argmax[i] = -1;
  if (partials.expected != nullptr) partials.expected[i] = 0;
}

// Resets all partials of a row.
template <class Real>
__device__ inline void clear_row(const PartialStatsOf<Real>& partials, int64_t r) {
  for (int64_t s = 0; s < partials.partials; ++s) clear_partial(partials, s * partials.stride + r);
}

inline unsigned blocks_for(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > (1 << 30) ? (1 << 30) : blocks);
}

// Sum over a warp, the same in all lanes.
template <class Real>
__device__ inline Real warp_sum(Real value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Whether all other blocks of the grid have passed this call. Their earlier writes are then visible, but not
// through L1: read them with __ldcg(). All threads call it; *passed is 0 before and after.
__device__ inline bool is_last_block(uint32_t* passed) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(passed, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Sum over a block of kThreads, in the same order every time. All threads call it; thread 0 gets the result.
template <int kThreads, class T>
__device__ inline T block_sum(T value) {
  __shared__ T sums[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(~0u, value, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  T total = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kThreads / 32; ++i) total += sums[i];
  }
  __syncthreads();
  return total;
}

}  // namespace logitless::cuda
