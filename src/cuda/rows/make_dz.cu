#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/exp2.cuh"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
// A thread works on four at once: with as many loads under way, memory is used at its rate.
constexpr int kVectors = 4;
constexpr int64_t kStep = int64_t{8} * kThreads * kVectors;  // elements of a row that a block changes at once

// log2(p) with the precision of kept exp logits.
template <class T>
__device__ __forceinline__ float log2_of(float p) {
  return std::is_same_v<T, float> ? log2f(p) : log2_approx(p);
}

// Each row of the matrix has a row of blocks. The target's element is made from its logit, which keeps the
// digits of p - 1.
template <class T>
__global__ void __launch_bounds__(kThreads) make_dz_kernel(Arena arena, MakeDz m) {
  const int64_t r = blockIdx.x;
  if (r >= existing(m.row_count, m.rows)) return;
  const int32_t target = arena.target[m.first + r];
  const float scale = target == kIgnoredRow ? 0.0f : m.scale != nullptr ? *m.scale : 1.0f;
  const RowCoefficients<float> of_row = {arena.a[r], arena.b != nullptr ? arena.b[r] : 0.0f,
                                         arena.c != nullptr ? arena.c[r] : 0.0f, arena.g[r]};
  const float inverse_sum = 1 / arena.kept_sum[r];
  const float a = of_row.a * scale, b = of_row.b * scale * kLn2, c = of_row.c * scale;
  const T* from = m.exp_logits.row<T>(r);
  T* to = m.dz.row<T>(r);
  const auto columns = static_cast<int>(m.columns), first_column = static_cast<int>(m.first_column);
  const int8_t* exponents = m.exponents.data + r * m.exponents.stride;
  // The factor that makes a stored value a probability.
  const auto unit_of = [&](int j) {
    if constexpr (!std::is_same_v<T, __half>) return inverse_sum;
    // In this order no factor leaves float32's range. The sum has the unit 2^kKeptExponent, the stored values
    // do not.
    return inverse_sum * power_of_two(-exponents[(first_column + j) / kExponentColumns]) *
           power_of_two(kKeptExponent);
  };
  const auto dz_of = [&](const T& exp_logit, float unit, int j) {
    const float p = to_float(exp_logit) * unit;
    float dz = p == 0 ? 0.0f : p * (b != 0 && p >= 0x1p-126f ? fmaf(b, log2_of<T>(p), a) : a);
    if (c != 0) dz += m.column_weight != nullptr ? c * m.column_weight[j] : c;
    return from_float<T>(scale == 0 ? 0.0f : dz);
  };
  const int step = static_cast<int>(gridDim.y * kStep);
  for (int first = 8 * static_cast<int>(blockIdx.y * kThreads * kVectors + threadIdx.x); first < columns;
       first += step) {
    Vector8<T> elements[kVectors];
    float unit[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int j = first + v * 8 * kThreads;
      if (j + 8 > columns) continue;
      elements[v] = *reinterpret_cast<const Vector8<T>*>(from + j);
      unit[v] = unit_of(j);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int j = first + v * 8 * kThreads;
      if (j + 8 <= columns) {
#pragma unroll
        for (int k = 0; k < 8; ++k) elements[v].x[k] = dz_of(elements[v].x[k], unit[v], j + k);
        *reinterpret_cast<Vector8<T>*>(to + j) = elements[v];
      } else {
        for (int k = j; k < columns; ++k) to[k] = dz_of(from[k], unit_of(k), k);
      }
    }
  }
  const int64_t own_target = int64_t{target} - m.first_column;
  const bool is_here =
      own_target >= 0 && own_target < columns && own_target / kStep % int64_t{gridDim.y} == blockIdx.y;
  if (!is_here || arena.joined.target != nullptr) return;  // several targets a row come later
  __syncthreads();                                         // over the element that another thread wrote
  if (threadIdx.x != 0) return;
  const float w = m.column_weight != nullptr ? m.column_weight[own_target] : 1.0f;
  const float log_p = (arena.target_logit[r] - arena.lse[r]) - arena.lse_residual[r];
  const float slope =
      m.transform.slope(arena.target_logit[r], m.transform.inverse_temperature_of(m.first + r));
  to[own_target] = from_float<T>(dz_element(of_row, log_p, w, 1.0f) * slope * scale);
}

}  // namespace

void launch_make_dz(const Arena& arena, const MakeDz& m, const Queue& queue) {
  constexpr int64_t kFewBlocks = 2048;
  const auto parts = static_cast<unsigned>(std::clamp<int64_t>(
      kFewBlocks / std::max<int64_t>(m.rows, 1), 1, std::max<int64_t>(ceil_div(m.columns, kStep), 1)));
  for_dtype(m.dz.dtype, [&](auto type) {
    queue.launch("make_dz", make_dz_kernel<decltype(type)>, dim3(static_cast<unsigned>(m.rows), parts),
                 kThreads, 0, arena, m);
  });
}

}  // namespace logitless::cuda
