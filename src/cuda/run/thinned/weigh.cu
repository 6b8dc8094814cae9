#include "core/thinning.h"
#include "cuda/rows/anchor.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/softcap.h"
#include "cuda/run/thinned/append.cuh"
#include "cuda/run/thinned/row_order.cuh"
#include "cuda/run/thinned/thinned.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 128;

// Numbers of a row that all its elements need.
struct Row {
  float lse, lse_low, p_over_q, inverse_cap;
  RowCoefficients<float> k;
  uint32_t bits;

  // Without a softcap 1 also at an infinite logit.
  __device__ float slope(float z) const { return inverse_cap == 0 ? 1 : softcap_slope(z, inverse_cap); }
  __device__ float log_p(float z) const { return (z - lse) - lse_low; }
  // What p is multiplied with.
  __device__ float factor(float z) const { return probability_factor(k, log_p(z)) * slope(z); }
};

__device__ Row load_row(const Weigh& w, const DrawLists& lists, int64_t r) {
  Row row{};
  row.lse = w.lse[r];
  row.lse_low = w.lse_low[r];
  // In parts, as their sums have no digit of what is left where both are huge.
  LogSumExp<double> guess{lists.guess[r], lists.guess_low[r]};
  if (w.base_2) {
    const SplitAnchor split = split_anchor(lists.guess[r], lists.guess_low[r]);
    guess = {split.far, -double{split.shift} / double{kLog2E}};
  }
  row.p_over_q = expf(static_cast<float>((guess.high - row.lse) + (guess.low - row.lse_low)));
  row.k = {w.a[r], w.b != nullptr ? w.b[r] : 0, 0, w.g[r]};
  row.inverse_cap = inverse_softcap(w.transform.softcap * w.transform.inverse_temperature_of(r));
  row.bits = draw_row_bits(*lists.seed, static_cast<uint32_t>(r));
  return row;
}

// One block a row: orders its list, draws again, and writes each kept element's part of dz.
__global__ void __launch_bounds__(kThreads) weigh_kernel(Weigh w, DrawLists lists) {
  Draw* const shared = dynamic_shared<Draw>();
  const int64_t r = blockIdx.x;
  const int32_t target = w.target[r];
  const int thread = static_cast<int>(threadIdx.x);
  if (target == kIgnoredRow) {
    if (thread != 0) return;
    w.kept_count[r] = 0;
    if (w.shown_count != nullptr) w.shown_count[r] = 0;
    if (w.shown_variance != nullptr) w.shown_variance[r] = 0;
    return;
  }
  // Loads before barriers, so that none waits behind them.
  const Row row = load_row(w, lists, r);
  const float target_logit = lists.target_logit[r];
  const bool dense = target >= 0 && w.role[target] >= 0;
  const int drawn = min(lists.count[r], w.capacity - 1);
  const RowOrder<kThreads> draws(lists.elements + r * w.capacity, drawn, shared);
  Kept* out = w.kept + r * w.capacity;  // may be the draws, which are in shared memory by now
  int count = 0;
  DrawVariance<float> moments;
  for (int first = 0; first < drawn; first += kThreads) {
    const int i = first + thread;
    Kept element{};
    bool keep = false;
    if (i < drawn) {
      const Draw draw = draws[i];
      const int32_t column = column_of(draw);
      const bool certain = (draw.column_and_certain & 1) != 0;
      const float z = draw.logit;
      const float p = expf(row.log_p(z));
      const uint32_t bits =
          draw_stream_bits(row.bits, *lists.seed, w.first_stream + static_cast<uint32_t>(column));
      const float weight =
          second_draw(certain ? p : w.threshold * row.p_over_q, w.threshold, draw_uniform(bits));
      const float factor = row.factor(z);
      element = {column, weight * factor};
      keep = weight != 0 && column != target;
      if (keep) {
        if (weight == p) {
          moments.add_exact(p * factor);
        } else {
          moments.add_drawn(p, factor, weight);
        }
      }
    }
    count = append<kThreads>(out, count, keep, element);
    if (keep && w.column_count != nullptr) atomicAdd(w.column_count + element.column, 1);
  }
  float variance = 0, square = 0;
  if (w.shown_variance != nullptr) {
    variance = block_sum<kThreads>(moments.variance);
    square = block_sum<kThreads>(moments.square);
  }
  if (thread != 0) return;
  float target_value = 0;
  if (target >= 0) {
    target_value = dz_element(row.k, row.log_p(target_logit), 1.0f, 1) * row.slope(target_logit);
  }
  if (target >= 0 && !dense) {
    out[count++] = {target, target_value};
    if (w.column_count != nullptr) atomicAdd(w.column_count + target, 1);
  }
  w.kept_count[r] = count;
  if (w.shown_count != nullptr) w.shown_count[r] = count + w.dense;
  if (w.shown_variance == nullptr) return;
  w.shown_variance[r] = variance;
  w.square[r] = square + (dense ? 0 : target_value * target_value);
}

// One block a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    relative_variance_kernel(const T* dz, int64_t stride, int64_t dense, const float* dz_unscale,
                             const float* square, float* variance) {
  const int64_t row = blockIdx.x;
  float sum = 0;
  for (int64_t k = threadIdx.x; k < dense; k += kThreads) {
    const float d = to_float(dz[row * stride + k]) * *dz_unscale;
    sum = fmaf(d, d, sum);
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0 && variance[row] != 0) variance[row] /= square[row] + sum;
}

}  // namespace

void launch_weigh(const Weigh& w, const Queue& queue) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const int longest = longest_list(query_device(device).capability);
  allow_shared_memory(kernel_pointer(weigh_kernel), device, static_cast<int>(row_order_bytes(longest)));
  queue.launch(weigh_kernel, static_cast<unsigned>(w.rows), kThreads, row_order_bytes(w.capacity), w,
               *w.lists);
  check_launch("weigh");
}

void launch_relative_variance(const void* dz, DType dtype, int64_t stride, int64_t rows, int64_t dense,
                              const float* dz_unscale, const float* square, float* variance,
                              const Queue& queue) {
  for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    queue.launch(relative_variance_kernel<T>, static_cast<unsigned>(rows), kThreads, 0,
                 static_cast<const T*>(dz), stride, dense, dz_unscale, square, variance);
  });
  check_launch("relative_variance");
}

}  // namespace logitless::cuda
