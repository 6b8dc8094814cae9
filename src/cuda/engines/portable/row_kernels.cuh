#pragma once
// From a block of dot products to statistics, exps or gradients; one block of threads a row.
#include "core/top_k.h"
#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"

namespace logitless::cuda::portable {

inline constexpr int kRowThreads = 256;

// What a kernel knows of a launch, in one parameter: of two, nvcc 13 makes each kernel's loops anew for each
// transform, and stats_kernel takes 60 registers in place of 42.
template <class Args, class Real = float>
struct RowParams {
  LogitsProductOf<Real> product;
  Args args;
};

template <class Real>
struct Tile {
  Real* z;  // [rows, stride] dot products
  int64_t stride;
  int64_t row, column;  // of its first element in the arguments' matrices
  int64_t rows, columns;
  // Columns that a block of threads of stats_kernel takes, and the slot of the first of them; slots are those
  // of strips in turn.
  int64_t strip;
  int64_t first_slot;
};

// inverse_temperature: of the row.
template <class Real>
__device__ inline Real transformed(const LogitsProductOf<Real>& product, Real dot, int64_t column,
                                   Real inverse_temperature) {
  return product.transform.logit(dot, product.transform.bias_of(column), inverse_temperature);
}

// Largest value of the block and its first index, a NaN being the largest of all; known to all threads.
template <class Real>
__device__ inline void block_max(Real& value, int32_t& index) {
  __shared__ Real values[kRowThreads / 32];
  __shared__ int32_t indices[kRowThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    const Real v = __shfl_xor_sync(~0u, value, step);
    const int32_t i = __shfl_xor_sync(~0u, index, step);
    if (is_better(v, i, value, index)) value = v, index = i;
  }
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value, indices[threadIdx.x / 32] = index;
  __syncthreads();
  for (int w = 0; w < kRowThreads / 32; ++w) {
    if (is_better(values[w], indices[w], value, index)) value = values[w], index = indices[w];
  }
  __syncthreads();
}

// exp(z - anchor), NaN where both are infinite.
template <class Real>
__device__ inline Real exp_from(Real z, Real anchor) {
  return z == -std::numeric_limits<Real>::infinity() ? Real(0) : std::exp(z - anchor);
}

// Whether the row of this block is to be computed.
template <class Real>
__device__ inline bool row_exists(const LogitsProductOf<Real>& product, int64_t row) {
  if (row >= existing(product.row_count, product.rows)) return false;
  return product.row_block_active == nullptr || product.row_block_active[row / kRowBlock] != 0;
}

// The optional sums of a row of the tile, each thread's and then (join()) those of all in thread 0.
struct Parts {
#define LOGITLESS_MEMBER(name, part, ...) double part = 0;
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_MEMBER)
#undef LOGITLESS_MEMBER

  // The logit of a column of the arguments' matrices, and its exp relative to the anchor.
  template <class Real>
  __device__ void add(const RowSumsOf<Real>& args, int64_t column, double z, double anchor, double e) {
    [[maybe_unused]] const double w = args.class_weight != nullptr ? double{args.class_weight[column]} : 1;
    // `weighted` is of the logits themselves: no slot tells the class weights of its columns.
#define LOGITLESS_SUM(name, part, kind, term)                                             \
  if (args.stats.part != nullptr) {                                                       \
    [[maybe_unused]] const double d = SumKind::kind == SumKind::kOffset ? z : z - anchor; \
    part += term;                                                                         \
  }
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  }
  __device__ void join() {
#define LOGITLESS_SUM(name, part, ...) part = block_sum<kRowThreads>(part);
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
  }
  __device__ RowStats<double> stats(double max, double sum_exp) const {
    RowStats<double> out;
    out.max = max;
    out.sum_exp = sum_exp;
#define LOGITLESS_SUM(name, part, ...) out.part = part;
    LOGITLESS_OPTIONAL_SUMS(LOGITLESS_SUM)
#undef LOGITLESS_SUM
    return out;
  }
};

// One block of threads for each row and strip.
template <class Real>
__global__ void __launch_bounds__(kRowThreads)
    stats_kernel(RowParams<RowSumsOf<Real>, Real> params, Tile<Real> tile) {
  const LogitsProductOf<Real>& product = params.product;
  const RowSumsOf<Real>& args = params.args;
  const int64_t row = tile.row + blockIdx.x;
  if (!row_exists(product, row)) return;
  Real* z = tile.z + blockIdx.x * tile.stride + blockIdx.y * tile.strip;
  const int64_t slot = (tile.first_slot + blockIdx.y) * args.stats.stride + row;
  tile.column += blockIdx.y * tile.strip;
  tile.columns = min(tile.strip, tile.columns - blockIdx.y * tile.strip);
  const Real inverse_temperature = product.transform.inverse_temperature_of(row);
  const StatSlotsOf<Real>& slots = args.stats;
  const int64_t target =
      product.target == nullptr ? -1 : product.target[row] - product.column_offset - tile.column;
  Real largest = -std::numeric_limits<Real>::infinity();
  int32_t at = INT32_MAX;
  for (int64_t j = threadIdx.x; j < tile.columns; j += kRowThreads) {
    z[j] = transformed(product, z[j], tile.column + j, inverse_temperature);
    if (is_better(z[j], static_cast<int32_t>(j), largest, at)) largest = z[j], at = static_cast<int32_t>(j);
    if (j == target) args.target_logit[row] = z[j];
  }
  block_max(largest, at);
  double sum = 0;
  Parts parts;
  for (int64_t j = threadIdx.x; j < tile.columns; j += kRowThreads) {
    const Real e = exp_from(z[j], largest);
    sum += e;
    parts.add(args, tile.column + j, z[j], largest, e);
  }
  sum = block_sum<kRowThreads>(sum);
  parts.join();
  if (threadIdx.x != 0) return;
  RowStats<double> mine = parts.stats(largest, sum);
  mine.argmax = product.column_offset + tile.column + at;
  const RowStats<double> all = merge(stats_of_slot(slots, tile.first_slot + blockIdx.y, row), mine);
  put_slot(slots, slot, all);
  if (slots.argmax != nullptr) slots.argmax[slot] = static_cast<int32_t>(all.argmax);
}

// After stats_kernel, whose logits are in z and whose maxima in the slots: the exps of whole rows, relative
// to their maximum.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    keep_exps_kernel(RowParams<ExpsArgs> params, Tile<float> tile) {
  const LogitsProduct& product = params.product;
  const ExpsArgs& args = params.args;
  const int64_t row = tile.row + blockIdx.x;
  if (!row_exists(product, row)) return;
  const float* z = tile.z + blockIdx.x * tile.stride;
  const float inverse_temperature = product.transform.inverse_temperature_of(row);
  const StatSlots& slots = args.stats;
  float largest = -CUDART_INF_F;
  for (int64_t s = 0; s < slots.slots; ++s) {
    const float one = slots.max[s * slots.stride + row];
    if (is_better(one, 0, largest, 0)) largest = one;
  }
  T* out = static_cast<T*>(args.exps.data) + row * args.exps.stride;
  for (int64_t j = threadIdx.x; j < tile.columns; j += kRowThreads) {
    const float e = exp_from(z[j], largest);
    out[j] = from_float<T>(e == 0 ? 0.0f : e * product.transform.slope(z[j], inverse_temperature));
  }
  if (threadIdx.x == 0) args.found_anchor[row] = largest;
}

// Of whole rows: the maximum is known before anything is stored, and is the anchor.
template <class T>
__global__ void __launch_bounds__(kRowThreads) exps_kernel(RowParams<ExpsArgs> params, Tile<float> tile) {
  const LogitsProduct& product = params.product;
  const ExpsArgs& args = params.args;
  const int64_t row = tile.row + blockIdx.x;
  if (!row_exists(product, row)) return;
  float* z = tile.z + blockIdx.x * tile.stride;
  const float inverse_temperature = product.transform.inverse_temperature_of(row);
  T* out = static_cast<T*>(args.exps.data) + row * args.exps.stride;
  const int64_t target = product.target[row];
  float largest = -CUDART_INF_F;
  int32_t at = INT32_MAX;
  for (int64_t j = threadIdx.x; j < tile.columns; j += kRowThreads) {
    z[j] = transformed(product, z[j], j, inverse_temperature);
    if (is_better(z[j], static_cast<int32_t>(j), largest, at)) largest = z[j], at = static_cast<int32_t>(j);
    if (j == target) args.target_logit[row] = z[j];
  }
  block_max(largest, at);
  double sum = 0;
  Parts parts;
  for (int64_t j = threadIdx.x; j < tile.columns; j += kRowThreads) {
    const float e = exp_from(z[j], largest);
    sum += e;
    parts.add(args, j, z[j], largest, e);
    out[j] = from_float<T>(e == 0 ? 0.0f : e * product.transform.slope(z[j], inverse_temperature));
  }
  sum = block_sum<kRowThreads>(sum);
  parts.join();
  if (threadIdx.x != 0) return;
  args.found_anchor[row] = largest;
  const StatSlots& slots = args.stats;
  slots.sum[row] = static_cast<float>(sum);
#define LOGITLESS_STORE(name, part, ...) \
  if (slots.part != nullptr) slots.part[row] = static_cast<float>(parts.part);
  LOGITLESS_OPTIONAL_SUMS(LOGITLESS_STORE)
#undef LOGITLESS_STORE
  if (slots.max != nullptr) slots.max[row] = largest;
  if (slots.argmax != nullptr) slots.argmax[row] = at;
}

template <class T, class Real = RealOf<T>>
__global__ void __launch_bounds__(kRowThreads)
    gradient_kernel(RowParams<GradientArgsOf<Real>, Real> params, Tile<Real> tile) {
  const LogitsProductOf<Real>& product = params.product;
  const GradientArgsOf<Real>& args = params.args;
  const int64_t row = tile.row + blockIdx.x;
  if (!row_exists(product, row)) return;
  const Real* z = tile.z + blockIdx.x * tile.stride;
  const Real inverse_temperature = product.transform.inverse_temperature_of(row);
  T* out = static_cast<T*>(args.dz.data) + row * args.dz.stride + tile.column;
  const int32_t y = product.target[row];
  const int64_t target = y - product.column_offset - tile.column;
  const float factor = args.factor != nullptr ? *args.factor : 1.0f;
  const Real lse = args.lse[row], low = args.lse_low != nullptr ? args.lse_low[row] : 0;
  const RowCoefficients<Real> k = {args.a[row], args.b != nullptr ? args.b[row] : 0,
                                   args.c != nullptr ? args.c[row] : 0, args.g[row]};
  for (int64_t j = threadIdx.x; j < tile.columns; j += kRowThreads) {
    const Real x = transformed(product, z[j], tile.column + j, inverse_temperature);
    const Real weight = args.class_weight != nullptr ? args.class_weight[tile.column + j] : 1;
    const Real v = dz_element(k, (x - lse) - low, weight, j == target ? 1 : 0);
    out[j] =
        from_real<T>(y == kIgnoredRow ? 0 : v * product.transform.slope(x, inverse_temperature) * factor);
  }
}

}  // namespace logitless::cuda::portable
