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
constexpr int kInFlight = 4;  // pieces of 8 elements of each operand that a thread waits for at once

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

// Arguments of the kernel besides the arena.
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

// The dot product of two rows. Called by a warp.
template <bool kAligned, class H, class C>
__device__ float dot_of_rows(const H* hidden, const C* weight, int64_t columns, DType operand, int lane) {
  float sum = 0;
  for (int64_t first = 8 * lane; first < columns; first += kInFlight * 8 * 32) {
    Loading8<kAligned, H> of_hidden[kInFlight];
    Loading8<kAligned, C> of_weight[kInFlight];
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {  // no load waits for another
      const int64_t i = first + p * 8 * 32;
      const int left = static_cast<int>(min(max(columns - i, int64_t{0}), int64_t{8}));
      of_weight[p] = start_load8<kAligned>(weight + i, left, extent_of(weight, columns));
      of_hidden[p] = start_load8<kAligned>(hidden + i, left, extent_of(hidden, columns));
    }
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int left = static_cast<int>(min(max(columns - first - p * 8 * 32, int64_t{0}), int64_t{8}));
      const Vector8<H> e = end_load8(of_hidden[p], left);
      const Vector8<C> c = end_load8(of_weight[p], left);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        sum = fmaf(to_operand(e.x[k], operand), to_operand(c.x[k], operand), sum);
      }
    }
  }
  return warp_sum(sum);
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

// A kept element between the second draw and its list.
struct Candidate {
  int32_t column;
  float z8, z, probability;  // probability: of having been kept
};

// One block for each row: orders its list, draws again with the screen's lse, evaluates what is left, and
// corrects the row's sums. Values of lists are weights times t'(z), in units of exp(z - lse8).
template <bool kAligned, class H, class C>
__global__ void __launch_bounds__(kThreads) settle_screen_kernel(SparsifiedArena t, Settle w) {
  __shared__ Candidate kept[kThreads];
  __shared__ int kept_of_warp[kWarps];
  const DrawLists& lists = t.lists;
  const Arena& a = t.base;
  const int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t target = a.target[r];
  const LogSumExp<float> lse8{a.lse[r], a.lse_residual[r]};
  const bool finite = fabsf(lse8.high) < CUDART_INF_F;
  if (target == kIgnoredRow || !finite) {
    if (thread != 0) return;
    t.screen.list_count[r] = 0;
    t.screen.factor[r] = 0;
    t.screen.variance[r] = t.screen.square[r] = target == kIgnoredRow ? 0 : CUDART_NAN_F;
    if (w.loss_error != nullptr) w.loss_error[r] = target == kIgnoredRow ? 0 : CUDART_NAN_F;
    return;
  }
  const float p_over_q = p_over_q_of(t, w.base_2, r);
  const uint32_t bits = draw_row_bits(*lists.seed, static_cast<uint32_t>(r));
  const float inverse_temperature = w.transform.inverse_temperature_of(r);
  const RowSlope slope(w.transform, r);
  // Sums of these rows are of exact logits.
  const bool is_exact = lists.summed_again[r / kRowBlock] != 0;
  const int drawn = min(lists.count[r], static_cast<int>(t.sizes.capacity) - 1);
  const RowOrder<kThreads> draws(lists.elements + r * t.sizes.capacity, drawn, dynamic_shared<Draw>());
  Kept* out = t.kept + r * t.sizes.capacity;  // may overwrite the draws, which are in shared memory by now
  const H* hidden = w.hidden.row<H>(r);
  const auto logit = [&](int32_t column) {  // called by a warp
    const float dot =
        dot_of_rows<kAligned>(hidden, w.weight.row<C>(column), w.columns, w.operand_dtype, lane);
    const float bias = w.transform.bias != nullptr ? w.transform.bias[column] : 0.0f;
    return w.transform.logit(dot, bias, inverse_temperature);
  };
  ScreenedSum<double> sum;  // a large q8 must not take the digits of a small q
  DrawVariance<float> moments;
  if (warp == 0 && !is_exact && target >= 0) {
    const float z = logit(target);
    if (lane == 0) {
      lists.target_logit[r] = z;
      if (t.role[target] < 0) sum.add(1, lse8.log_p(z), lse8.log_p(t.screen.target_logit8[r]));
    }
  }
  int count = 0;
  for (int first = 0; first < drawn; first += kThreads) {
    Candidate own{};
    bool keep = false;
    if (first + thread < drawn) {
      const Draw draw = draws[first + thread];
      const int32_t column = column_of(draw);
      const bool certain = (draw.column_and_certain & 1) != 0;
      const float p8 = expf(lse8.log_p(draw.logit));
      const uint32_t of_column =
          draw_stream_bits(bits, *lists.seed, w.first_stream + static_cast<uint32_t>(column));
      const float weight =
          second_draw(certain ? p8 : t.threshold * p_over_q, t.threshold, draw_uniform(of_column));
      keep = weight != 0 && column != target;
      own = {column, draw.logit, 0, p8 / weight};
    }
    const unsigned ballot = __ballot_sync(~0u, keep);
    if (lane == 0) kept_of_warp[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) before += kept_of_warp[i];
      all += kept_of_warp[i];
    }
    if (keep) kept[before + __popc(ballot & ((1u << lane) - 1))] = own;
    __syncthreads();
    for (int i = warp; i < all; i += kWarps) {
      const float z = logit(kept[i].column);
      if (lane == 0) kept[i].z = z;
    }
    __syncthreads();
    if (thread < all) {
      const Candidate element = kept[thread];
      const float log_q = lse8.log_p(element.z);
      if (!is_exact) sum.add(element.probability, log_q, lse8.log_p(element.z8));
      const float of_element = slope(element.z);
      const float q = expf(log_q), weight = q / element.probability;
      if (element.probability == 1) {
        moments.add_exact(q * of_element);
      } else {
        moments.add_drawn(q, of_element, weight);
      }
      if (w.keeps) out[count + thread] = {element.column, weight * of_element};
    }
    count += all;
    __syncthreads();
  }
  const ScreenedSum<double> joined = block_joined(sum);
  const float variance = block_sum<kThreads>(moments.variance);
  const float square = block_sum<kThreads>(moments.square);
  __shared__ float factor;
  if (thread == 0) {
    const double log_sum = is_exact ? 0 : joined.log_sum();
    factor = static_cast<float>(exp(log_sum));
    t.screen.list_count[r] = count;
    t.screen.factor[r] = static_cast<float>(exp(-log_sum));
    t.screen.variance[r] = variance;
    t.screen.square[r] = square;
    if (w.loss_error != nullptr) {
      w.loss_error[r] = is_exact ? 0 : static_cast<float>(sqrt(joined.relative_variance()));
    }
  }
  __syncthreads();
  for (int64_t s = thread; s < a.partials.partials; s += kThreads)
    a.partials.sum[s * a.partials.stride + r] *= factor;
}

// Arguments of the kernel besides the arena.
struct FinishLists {
  LogitTransform<float> transform;
  int32_t* out_count;   // Buffers::kept_count, or null
  float* out_variance;  // Buffers::draw_variance, or null
};

// One block for each row: turns values of lists into gradients, once the row's coefficients are known, and
// adds the target.
__global__ void __launch_bounds__(kThreads) finish_screened_lists_kernel(SparsifiedArena t, FinishLists w) {
  const Arena& a = t.base;
  const int64_t r = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int32_t target = a.target[r];
  if (target == kIgnoredRow) {
    if (thread != 0) return;
    t.kept_count[r] = 0;
    if (w.out_count != nullptr) w.out_count[r] = 0;
    if (w.out_variance != nullptr) w.out_variance[r] = 0;
    return;
  }
  const float factor = a.a[r] * t.screen.factor[r];
  const int count = t.screen.list_count[r];
  Kept* list = t.kept + r * t.sizes.capacity;
  for (int i = thread; i < count; i += kThreads) {
    list[i].value *= factor;
    if (t.lists_columns) atomicAdd(t.column_count + list[i].column, 1);
  }
  if (thread != 0) return;
  const bool dense = target >= 0 && t.role[target] >= 0;
  const float z = t.lists.target_logit[r];
  const RowCoefficients<float> k{a.a[r], 0, 0, a.g[r]};
  const float log_p = (z - a.lse[r]) - a.lse_residual[r];
  const float value = target >= 0 ? dz_element(k, log_p, 1.0f, 1) * RowSlope(w.transform, r)(z) : 0;
  int all = count;
  if (target >= 0 && !dense) {
    list[all++] = {target, value};
    if (t.lists_columns) atomicAdd(t.column_count + target, 1);
  }
  t.kept_count[r] = all;
  if (w.out_count != nullptr) w.out_count[r] = all + static_cast<int32_t>(t.sizes.dense);
  if (w.out_variance == nullptr) return;
  w.out_variance[r] = t.screen.variance[r] * factor * factor;
  t.row_threshold[r] = t.screen.square[r] * factor * factor + (dense ? 0 : value * value);
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
  const bool aligned = is_aligned8(w.hidden, w.columns) && is_aligned8(w.weight, w.columns);
  for_dtype(w.hidden.dtype, [&](auto h) {
    for_dtype(w.weight.dtype, [&](auto c) {
      using H = decltype(h);
      using C = decltype(c);
      const auto kernel = aligned ? settle_screen_kernel<true, H, C> : settle_screen_kernel<false, H, C>;
      allow_shared_memory(kernel_pointer(kernel), device, static_cast<int>(row_order_bytes(longest)));
      run.queue.launch("settle_screen", kernel, static_cast<unsigned>(t.rows), kThreads,
                       row_order_bytes(static_cast<int>(t.sizes.capacity)), t, w);
    });
  });
}

void launch_finish_screened_lists(const Runner& run, const SparsifiedArena& t) {
  const FinishLists w{.transform = run.transform,
                      .out_count = run.buffers.kept_count,
                      .out_variance = static_cast<float*>(run.buffers.draw_variance)};
  run.queue.launch("finish_screened_lists", finish_screened_lists_kernel, static_cast<unsigned>(t.rows),
                   kThreads, 0, t, w);
}

}  // namespace logitless::cuda
