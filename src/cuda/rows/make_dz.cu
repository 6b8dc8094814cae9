#include <algorithm>

#include "cuda/plan/sizes.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kStep = int64_t{8} * kThreads;  // elements of a row that a block changes at once

// Each row of the matrix has a row of blocks. The target's element is made from its logit, which keeps the
// digits of p - 1.
template <class T>
__global__ void __launch_bounds__(kThreads) make_dz_kernel(Arena arena, MakeDz m) {
  const int64_t r = blockIdx.x;
  if (r >= existing(m.row_count, m.rows)) return;
  const int32_t target = arena.target[m.first + r];
  const bool is_ignored = target == kIgnoredRow;
  const float scale = m.scale != nullptr ? *m.scale : 1.0f;
  const RowCoefficients<float> of_row = {arena.a[r], arena.b != nullptr ? arena.b[r] : 0.0f,
                                         arena.c != nullptr ? arena.c[r] : 0.0f, arena.g[r]};
  const float inverse_sum = 1 / arena.kept_sum[r];
  const T* from = m.exp_logits.row<T>(r);
  T* to = m.dz.row<T>(r);
  // The factor that makes a stored value a probability.
  const auto unit_of = [&](int64_t j) {
    if constexpr (!std::is_same_v<T, __half>) return inverse_sum;
    const int64_t group = (m.first_column + j) / kExponentColumns;
    return inverse_sum * power_of_two(-m.exponents.data[r * m.exponents.stride + group]);
  };
  const auto dz_of = [&](const T& exp_logit, float unit, int64_t j) {
    const float p = to_float(exp_logit) * unit;
    float dz = p == 0 ? 0.0f : p * (of_row.b != 0 ? fmaf(of_row.b, logf(p), of_row.a) : of_row.a);
    if (of_row.c != 0) dz += m.column_weight != nullptr ? of_row.c * m.column_weight[j] : of_row.c;
    return from_float<T>(is_ignored ? 0.0f : dz * scale);
  };
  const bool has_one_target = arena.joined.target == nullptr;  // a row
  const int64_t own_target = int64_t{target} - m.first_column;
  const int64_t step = gridDim.y * kStep;
  for (int64_t j = 8 * (int64_t{blockIdx.y} * kThreads + threadIdx.x); j < m.columns; j += step) {
    if (j + 8 <= m.columns) {
      Vector8<T> elements = *reinterpret_cast<const Vector8<T>*>(from + j);
      const float unit = unit_of(j);
#pragma unroll
      for (int k = 0; k < 8; ++k) elements.x[k] = dz_of(elements.x[k], unit, j + k);
      *reinterpret_cast<Vector8<T>*>(to + j) = elements;
    } else {
      for (int64_t k = j; k < m.columns; ++k) to[k] = dz_of(from[k], unit_of(k), k);
    }
    if (has_one_target && own_target >= j && own_target < min(j + 8, m.columns)) {
      const float w = m.column_weight != nullptr ? m.column_weight[own_target] : 1.0f;
      const float log_p = (arena.target_logit[r] - arena.lse[r]) - arena.lse_residual[r];
      const float slope =
          m.transform.slope(arena.target_logit[r], m.transform.inverse_temperature_of(m.first + r));
      to[own_target] = from_float<T>(dz_element(of_row, log_p, w, 1.0f) * slope * scale);
    }
  }
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
