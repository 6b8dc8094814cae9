#include "core/sparsification.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/append.cuh"
#include "cuda/run/sparsified/row_order.cuh"
#include "cuda/run/sparsified/sparsified.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 128;

// Arguments of the kernel besides the arena.
struct Reweight {
  uint32_t first_stream;  // global number of column 0
  bool base_2;            // the lse estimate is its rounded_offset()
  LogitTransform<float> transform;
  ListOutputs outputs;
};

// Numbers of a row that all its elements need.
struct Row {
  float lse, lse_residual, p_over_q;
  RowSlope slope;
  RowCoefficients<float> k;
  uint32_t bits;

  __device__ float log_p(float z) const { return (z - lse) - lse_residual; }
  // The factor of p.
  __device__ float factor(float z) const { return probability_factor(k, log_p(z)) * slope(z); }
};

__device__ Row load_row(const SparsifiedArena& t, const Reweight& w, int64_t r) {
  const Arena& a = t.base;
  return {.lse = a.lse[r],
          .lse_residual = a.lse_residual[r],
          .p_over_q = p_over_q_of(t, w.base_2, r),
          .slope = {w.transform, r},
          .k = {a.a[r], a.b != nullptr ? a.b[r] : 0, 0, a.g[r]},
          .bits = draw_row_bits(*t.lists.seed, static_cast<uint32_t>(r))};
}

// One block for each row: orders its list, draws again, and writes each kept element's part of dz.
__global__ void __launch_bounds__(kThreads) reweight_kernel(SparsifiedArena t, Reweight w) {
  const DrawLists& lists = t.lists;
  Draw* const shared = dynamic_shared<Draw>();
  const int64_t r = blockIdx.x;
  const int32_t target = t.base.target[r];
  const int thread = static_cast<int>(threadIdx.x);
  if (target == kIgnoredRow) {
    if (thread == 0) finish_ignored_list(t, w.outputs, r);
    return;
  }
  // Loads come before barriers, so that none waits behind them.
  const Row row = load_row(t, w, r);
  const float target_logit = lists.target_logit[r];
  const int drawn = min(lists.count[r], static_cast<int>(t.sizes.capacity) - 1);
  const RowOrder<kThreads> draws(lists.elements + r * t.sizes.capacity, drawn, shared);
  Kept* out = t.kept + r * t.sizes.capacity;  // may overwrite the draws, which are in shared memory by now
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
          second_draw(certain ? p : t.threshold * row.p_over_q, t.threshold, draw_uniform(bits));
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
    if (keep && t.lists_columns) atomicAdd(t.column_count + element.column, 1);
  }
  float variance = 0, square = 0;
  if (w.outputs.draw_variance != nullptr) {
    variance = block_sum<kThreads>(moments.variance);
    square = block_sum<kThreads>(moments.square);
  }
  if (thread != 0) return;
  float target_value = 0;
  if (target >= 0) {
    target_value = dz_element(row.k, row.log_p(target_logit), 1.0f, 1) * row.slope(target_logit);
  }
  finish_list(t, w.outputs, r, count, target, target_value, variance, square);
}

// One block for each row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    relative_variance_kernel(ConstMatrix dz, int64_t dense, const float* dz_unscale, const float* square,
                             float* variance) {
  const int64_t row = blockIdx.x;
  float sum = 0;
  for (int64_t k = threadIdx.x; k < dense; k += kThreads) {
    const float d = to_float(dz.row<T>(row)[k]) * *dz_unscale;
    sum = fmaf(d, d, sum);
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0 && variance[row] != 0) variance[row] /= square[row] + sum;
}

}  // namespace

void launch_reweight(const Runner& run, const SparsifiedArena& t) {
  const Reweight w{.first_stream = static_cast<uint32_t>(run.problem.vocab_start),
                   .base_2 = run.traits().base_2,
                   .transform = run.transform,
                   .outputs = {run.buffers.kept_count, static_cast<float*>(run.buffers.draw_variance)}};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const int longest = longest_list(query_device(device).capability);
  allow_shared_memory(kernel_pointer(reweight_kernel), device, static_cast<int>(row_order_bytes(longest)));
  run.queue.launch("reweight", reweight_kernel, static_cast<unsigned>(t.rows), kThreads,
                   row_order_bytes(static_cast<int>(t.sizes.capacity)), t, w);
}

void launch_relative_variance(const ConstMatrix& dz, int64_t rows, int64_t dense, const float* dz_unscale,
                              const float* square, float* variance, const Queue& queue) {
  for_dtype(dz.dtype, [&](auto type) {
    queue.launch("relative_variance", relative_variance_kernel<decltype(type)>, static_cast<unsigned>(rows),
                 kThreads, 0, dz, dense, dz_unscale, square, variance);
  });
}

}  // namespace logitless::cuda
