#include "core/sparsification.h"
#include "cuda/plan/sizes.h"
#include "cuda/rows/finish_row.cuh"
#include "cuda/rows/vector8.cuh"
#include "cuda/run/sparsified/append.cuh"
#include "cuda/run/sparsified/row_order.cuh"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kInFlight = 4;  // pieces of 8 elements of each row that a thread waits for at once
constexpr int kAtOnce = 2;    // rows of the weight

__device__ double effective_offset(const SparsifiedArena& t, bool base_2, int64_t row) {
  const float offset = t.base.logit_offset[row];
  return base_2 ? rounded_offset(offset) : double{offset};
}

// One warp for each row.
__global__ void __launch_bounds__(kThreads) take_dense_sums_kernel(SparsifiedArena t) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= t.rows) return;
  const PartialStats& partials = t.base.partials;
  const double sum = warp_sum_of_partials(partials, partials.sum, row, lane);
  if (lane == 0) t.screen.dense_sum[row] = static_cast<float>(sum);
  for (int64_t s = lane; s < partials.partials; s += 32) clear_partial(partials, s * partials.stride + row);
}

__global__ void add_dense_sums_kernel(SparsifiedArena t, bool base_2) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= t.rows || t.base.target[row] == kIgnoredRow) return;
  const double exact = exp(double{t.screen.dense_lse[row]} - effective_offset(t, base_2, row));
  t.base.partials.sum[row] += static_cast<float>(exact - double{t.screen.dense_sum[row]});
}

// One warp for each row.
__global__ void __launch_bounds__(kThreads) screened_lse_kernel(SparsifiedArena t, bool base_2) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= t.rows) return;
  const double sum = warp_sum_of_partials(t.base.partials, t.base.partials.sum, row, lane);
  if (lane != 0) return;
  const LogSumExp<float> lse = split_to<float>(LogSumExp<double>{effective_offset(t, base_2, row), log(sum)});
  t.base.lse[row] = lse.high;
  t.base.lse_residual[row] = lse.low;
}

// Arguments of the kernels besides the arena.
struct Settle {
  uint32_t first_stream;  // global number of column 0
  bool base_2;            // the lse estimate is its rounded_offset()
  bool keeps;             // lists are wanted
  LogitTransform<float> transform;
  ConstMatrix hidden, weight;
  DType operand_dtype;  // to which products round float32
  int64_t columns;      // of both
  float* loss_error;    // Buffers::loss_error, or null
};

// A row's lse8, and what the second draw needs besides the row's draws.
struct ScreenedRow {
  LogSumExp<float> lse8;
  float drawn;  // weight after the first draw of an element that was not certain
  float threshold;

  __device__ ScreenedRow(const SparsifiedArena& t, bool base_2, int64_t r)
      : lse8{t.base.lse[r], t.base.lse_residual[r]},
        drawn(t.threshold * p_over_q_of(t, base_2, r)),
        threshold(t.threshold) {}

  __device__ float first_weight(const Draw& draw) const {
    return (draw.column_and_certain & 1) != 0 ? expf(lse8.log_p(draw.logit)) : drawn;
  }
  // The weight of an element that the second draw kept.
  __device__ float kept_weight(const Draw& draw) const { return fmaxf(first_weight(draw), threshold); }
};

__device__ bool is_settled(const SparsifiedArena& t, int64_t r, int32_t target) {
  return target != kIgnoredRow && fabsf(t.base.lse[r]) < CUDART_INF_F;
}

// One block for each row: orders its draws by ranges of columns, and draws again with the screen's lse.
__global__ void __launch_bounds__(kThreads) draw_screened_kernel(SparsifiedArena t, Settle w) {
  __shared__ int32_t in_range[kMostRanges];
  const DrawLists& lists = t.lists;
  const ColumnRanges ranges = t.screen.ranges;
  const int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t target = t.base.target[r];
  int32_t* range_end = t.screen.range_end + r * ranges.count;
  if (!is_settled(t, r, target)) {
    for (int i = thread; i < ranges.count; i += kThreads) range_end[i] = 0;
    return;
  }
  for (int i = thread; i < ranges.count; i += kThreads) in_range[i] = 0;
  const ScreenedRow row(t, w.base_2, r);
  const uint32_t bits = draw_row_bits(*lists.seed, static_cast<uint32_t>(r));
  const int drawn = min(lists.count[r], static_cast<int>(t.sizes.capacity) - 1);
  const RowOrder<kThreads> draws(lists.elements + r * t.sizes.capacity, drawn, dynamic_shared<Draw>(),
                                 ranges);
  Draw* out = t.screen.draws + r * t.sizes.capacity;  // may overwrite the draws, which are in shared memory
  int count = 0;
  for (int first = 0; first < drawn; first += kThreads) {
    Draw draw{};
    bool keep = false;
    if (first + thread < drawn) {
      draw = draws[first + thread];
      const int32_t column = column_of(draw);
      const uint32_t of_column =
          draw_stream_bits(bits, *lists.seed, w.first_stream + static_cast<uint32_t>(column));
      keep =
          second_draw(row.first_weight(draw), t.threshold, draw_uniform(of_column)) != 0 && column != target;
      if (keep) atomicAdd(in_range + ranges.of(column), 1);
    }
    count = append<kThreads>(out, count, keep, draw);
  }
  __syncthreads();
  if (thread != 0) return;
  int end = 0;
  for (int i = 0; i < ranges.count; ++i) range_end[i] = end += in_range[i];
}

// The dot products of a row of `hidden` and kAtOnce rows of the weight. Called by a warp.
template <bool kAligned, class H, class C>
__device__ void dots_of_rows(const H* hidden, const C* const (&weight)[kAtOnce], const Settle& w, int lane,
                             float (&sum)[kAtOnce]) {
  for (int64_t first = 8 * lane; first < w.columns; first += kInFlight * 8 * 32) {
    Loading8<kAligned, H> of_hidden[kInFlight];
    Loading8<kAligned, C> of_weight[kInFlight][kAtOnce];
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {  // no load waits for another
      const int64_t i = first + p * 8 * 32;
      const int left = static_cast<int>(min(max(w.columns - i, int64_t{0}), int64_t{8}));
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        of_weight[p][k] = start_load8<kAligned>(weight[k] + i, left, extent_of(weight[k], w.columns));
      }
      of_hidden[p] = start_load8<kAligned>(hidden + i, left, extent_of(hidden, w.columns));
    }
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int left = static_cast<int>(min(max(w.columns - first - p * 8 * 32, int64_t{0}), int64_t{8}));
      const Vector8<H> e = end_load8(of_hidden[p], left);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const Vector8<C> c = end_load8(of_weight[p][k], left);
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          sum[k] = fmaf(to_operand(e.x[x], w.operand_dtype), to_operand(c.x[x], w.operand_dtype), sum[k]);
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) sum[k] = warp_sum(sum[k]);
}

// One block for each row and range of columns: logits of what is left, and of the target. Blocks of a range
// run side by side, so that its part of the weight is in L2 while all rows read it.
template <bool kAligned, class H, class C>
__global__ void __launch_bounds__(kThreads) screened_logits_kernel(SparsifiedArena t, Settle w) {
  const int64_t r = blockIdx.x;
  const int range = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const ColumnRanges ranges = t.screen.ranges;
  const int32_t target = t.base.target[r];
  if (!is_settled(t, r, target)) return;
  const int32_t* range_end = t.screen.range_end + r * ranges.count;
  const int begin = range > 0 ? range_end[range - 1] : 0, end = range_end[range];
  // Sums of the rows that are summed again have the target's logit from their own product.
  const bool with_target =
      target >= 0 && ranges.of(target) == range && t.lists.summed_again[r / kRowBlock] == 0;
  const H* hidden = w.hidden.row<H>(r);
  const Draw* draws = t.screen.draws + r * t.sizes.capacity;
  const float inverse_temperature = w.transform.inverse_temperature_of(r);
  for (int i = begin + kAtOnce * warp; i < end + (with_target ? 1 : 0); i += kAtOnce * kWarps) {
    int32_t column[kAtOnce];
    const C* weight[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      column[k] = i + k < end ? column_of(draws[i + k]) : with_target ? target : column[0];
      weight[k] = w.weight.row<C>(column[k]);
    }
    float dot[kAtOnce] = {};
    dots_of_rows<kAligned>(hidden, weight, w, lane, dot);
    if (lane >= kAtOnce || i + lane > end) continue;
    const float own = lane == 0 ? dot[0] : dot[1];
    const int32_t of = lane == 0 ? column[0] : column[1];
    const float bias = w.transform.bias != nullptr ? w.transform.bias[of] : 0.0f;
    const float z = w.transform.logit(own, bias, inverse_temperature);
    if (i + lane < end) {
      t.screen.logits[r * t.sizes.capacity + i + lane] = z;
    } else if (with_target) {
      t.lists.target_logit[r] = z;
    }
  }
}

// Joins the sums of all threads of a block; thread 0 gets the result.
__device__ ScreenedSum<double> block_joined(const ScreenedSum<double>& own) {
  __shared__ double largest_of_warp[kWarps];
  double largest = own.largest;
  for (int step = 16; step > 0; step /= 2) largest = fmax(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) largest = fmax(largest, largest_of_warp[i]);
  const double factor = exp(own.largest - largest);
  ScreenedSum<double> all;
  all.largest = largest;
  all.change = block_sum<kThreads>(own.change * factor);
  all.variance = block_sum<kThreads>(own.variance * factor * factor);
  all.least = block_sum<kThreads>(own.least * factor);
  return all;
}

// One block for each row: replaces its sums by their estimate, which gets an offset of its own. Values of
// lists are weights times t'(z).
__global__ void __launch_bounds__(kThreads) settle_screen_kernel(SparsifiedArena t, Settle w) {
  const Arena& a = t.base;
  const int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t target = a.target[r];
  if (!is_settled(t, r, target)) {
    if (thread != 0) return;
    const float unknown = target == kIgnoredRow ? 0 : CUDART_NAN_F;
    t.screen.variance[r] = t.screen.square[r] = unknown;
    if (w.loss_error != nullptr) w.loss_error[r] = unknown;
    return;
  }
  const ScreenedRow row(t, w.base_2, r);
  const RowSlope slope(w.transform, r);
  // Sums of these rows are of exact logits.
  const bool is_exact = t.lists.summed_again[r / kRowBlock] != 0;
  ScreenedSum<double> sum;  // a large q8 must not take the digits of a small q
  if (thread == 0 && !is_exact) {
    // The dense columns are known exactly, and change nothing.
    const double dense = row.lse8.log_p(t.screen.dense_lse[r]);
    sum.add(1, dense, dense);
    if (target >= 0 && t.role[target] < 0) {
      sum.add(1, row.lse8.log_p(t.lists.target_logit[r]), row.lse8.log_p(t.screen.target_logit8[r]));
    }
  }
  const int count = t.screen.list_count(r);
  const int64_t list = r * t.sizes.capacity;
  const auto probability_of = [&](const Draw& draw) {
    return expf(row.lse8.log_p(draw.logit)) / row.kept_weight(draw);
  };
  for (int i = thread; !is_exact && i < count; i += kThreads) {
    const Draw draw = t.screen.draws[list + i];
    sum.add(probability_of(draw), row.lse8.log_p(t.screen.logits[list + i]), row.lse8.log_p(draw.logit));
  }
  const ScreenedSum<double> joined = block_joined(sum);
  __shared__ double log_sum;
  if (thread == 0) {
    log_sum = is_exact ? 0 : joined.log_sum();
    if (w.loss_error != nullptr) {
      w.loss_error[r] = is_exact ? 0 : static_cast<float>(sqrt(joined.relative_variance()));
    }
  }
  __syncthreads();
  DrawVariance<float> moments;
  for (int i = thread; i < count; i += kThreads) {
    const Draw draw = t.screen.draws[list + i];
    const float z = t.screen.logits[list + i], probability = probability_of(draw), of_element = slope(z);
    const float p = expf(static_cast<float>(row.lse8.log_p(z) - log_sum)), weight = p / probability;
    if (probability == 1) {
      moments.add_exact(p * of_element);
    } else {
      moments.add_drawn(p, of_element, weight);
    }
    if (w.keeps) t.kept[list + i] = {column_of(draw), weight * of_element};
  }
  const float variance = block_sum<kThreads>(moments.variance);
  const float square = block_sum<kThreads>(moments.square);
  if (thread == 0) {
    t.screen.variance[r] = variance;
    t.screen.square[r] = square;
  }
  if (is_exact) return;
  __shared__ float first;
  if (thread == 0) {
    const double lse = double{row.lse8.high} + (double{row.lse8.low} + log_sum);
    a.logit_offset[r] = static_cast<float>(lse);
    first = static_cast<float>(exp(lse - effective_offset(t, w.base_2, r)));
  }
  __syncthreads();
  for (int64_t s = thread; s < a.partials.partials; s += kThreads)
    a.partials.sum[s * a.partials.stride + r] = s == 0 ? first : 0;
}

// Arguments of the kernel besides the arena.
struct FinishLists {
  LogitTransform<float> transform;
  ListOutputs outputs;
};

// One block for each row: turns values of lists into gradients, once the row's coefficients are known, and
// adds the target.
__global__ void __launch_bounds__(kThreads) finish_screened_lists_kernel(SparsifiedArena t, FinishLists w) {
  const Arena& a = t.base;
  const int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t target = a.target[r];
  if (target == kIgnoredRow) {
    if (thread == 0) finish_ignored_list(t, w.outputs, r);
    return;
  }
  const float factor = a.a[r];
  const int count = t.screen.list_count(r);
  Kept* list = t.kept + r * t.sizes.capacity;
  for (int i = thread; i < count; i += kThreads) {
    list[i].value *= factor;
    if (t.lists_columns) atomicAdd(t.column_count + list[i].column, 1);
  }
  if (thread != 0) return;
  const float z = t.lists.target_logit[r];
  const RowCoefficients<float> k{a.a[r], 0, 0, a.g[r]};
  const float log_p = (z - a.lse[r]) - a.lse_residual[r];
  const float value = target >= 0 ? dz_element(k, log_p, 1.0f, 1) * RowSlope(w.transform, r)(z) : 0;
  finish_list(t, w.outputs, r, count, target, value, t.screen.variance[r] * factor * factor,
              t.screen.square[r] * factor * factor);
}

}  // namespace

void launch_take_dense_sums(const SparsifiedArena& t, const Queue& queue) {
  queue.launch("take_dense_sums", take_dense_sums_kernel, blocks_for(t.rows, kWarps), kThreads, 0, t);
}

void launch_add_dense_sums(const SparsifiedArena& t, bool base_2, const Queue& queue) {
  queue.launch("add_dense_sums", add_dense_sums_kernel, blocks_for(t.rows, kThreads), kThreads, 0, t, base_2);
}

void launch_screened_lse(const SparsifiedArena& t, bool base_2, const Queue& queue) {
  queue.launch("screened_lse", screened_lse_kernel, blocks_for(t.rows, kWarps), kThreads, 0, t, base_2);
}

void launch_settle_screen(const Runner& run, const SparsifiedArena& t) {
  const Settle w{.first_stream = static_cast<uint32_t>(run.problem.vocab_start),
                 .base_2 = run.traits().base_2,
                 .keeps = run.problem.needs_backward(),
                 .transform = run.transform,
                 .hidden = run.hidden(),
                 .weight = run.weight(),
                 .operand_dtype = run.dtype(),
                 .columns = run.problem.hidden,
                 .loss_error = static_cast<float*>(run.buffers.loss_error)};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const int longest = longest_list(query_device(device).capability);
  allow_shared_memory(kernel_pointer(draw_screened_kernel), device,
                      static_cast<int>(row_order_bytes(longest)));
  const auto rows = static_cast<unsigned>(t.rows);
  run.queue.launch("draw_screened", draw_screened_kernel, rows, kThreads,
                   row_order_bytes(static_cast<int>(t.sizes.capacity)), t, w);
  const bool aligned = is_aligned8(w.hidden, w.columns) && is_aligned8(w.weight, w.columns);
  for_dtype(w.hidden.dtype, [&](auto h) {
    for_dtype(w.weight.dtype, [&](auto c) {
      using H = decltype(h);
      using C = decltype(c);
      run.queue.launch("screened_logits",
                       aligned ? screened_logits_kernel<true, H, C> : screened_logits_kernel<false, H, C>,
                       dim3(rows, static_cast<unsigned>(t.screen.ranges.count)), kThreads, 0, t, w);
    });
  });
  run.queue.launch("settle_screen", settle_screen_kernel, rows, kThreads, 0, t, w);
}

void launch_finish_screened_lists(const Runner& run, const SparsifiedArena& t) {
  const FinishLists w{.transform = run.transform,
                      .outputs = {run.buffers.kept_count, static_cast<float*>(run.buffers.draw_variance)}};
  run.queue.launch("finish_screened_lists", finish_screened_lists_kernel, static_cast<unsigned>(t.rows),
                   kThreads, 0, t, w);
}

}  // namespace logitless::cuda
