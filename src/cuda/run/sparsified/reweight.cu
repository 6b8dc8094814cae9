#include <cub/block/block_scan.cuh>

#include "core/sparsification.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/softcap.h"
#include "cuda/run/sparsified/append.cuh"
#include "cuda/run/sparsified/sparsified.h"
#include "cuda/runtime/check.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/dynamic_shared.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 128;

// The order of a row's draws. They arrive in any order, and get one that depends on their columns alone,
// which makes sums repeatable: by a hash of the column, and by column for equal hashes. Most hashes have at
// most one draw (in lists of up to kMostBuckets), so this takes a few steps for each draw. Sorting would take
// the square of the number of doublings of the list.
constexpr int kMostBuckets = 2048;

// As many buckets as draws, rounded up to a power of two, but at most kMostBuckets.
__host__ __device__ int row_buckets(int draws) {
  int buckets = 2;
  while (buckets < draws && buckets < kMostBuckets) buckets *= 2;
  return buckets;
}

// Shared memory for rows of at most `draws`.
size_t row_order_bytes(int draws) {
  return static_cast<size_t>(draws) * sizeof(Draw) +
         static_cast<size_t>(row_buckets(draws)) * sizeof(int32_t);
}

__device__ int32_t column_of(const Draw& draw) {
  return static_cast<int32_t>(static_cast<uint32_t>(draw.column_and_certain) >> 1);
}

// Used by a whole block of kThreads.
template <int kThreads>
class RowOrder {
 public:
  // `shared` has row_order_bytes() and is aligned like Draw.
  __device__ RowOrder(const Draw* draws, int count, void* shared)
      : buckets_(row_buckets(count)),
        ends_(static_cast<int32_t*>(shared)),
        draws_(reinterpret_cast<Draw*>(ends_ + buckets_)) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int b = thread; b < buckets_; b += kThreads) ends_[b] = 0;
    __syncthreads();
#pragma unroll 1  // most threads have one draw or two
    for (int i = thread; i < count; i += kThreads) atomicAdd(ends_ + bucket_of(draws[i]), 1);
    __syncthreads();
    counts_to_starts();
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < count; i += kThreads) {
      const Draw draw = draws[i];
      // After the last draw, a bucket's start has become its end.
      draws_[atomicAdd(ends_ + bucket_of(draw), 1)] = draw;
    }
    __syncthreads();
  }

  // The i-th draw in the order.
  __device__ Draw operator[](int i) const {
    const Draw draw = draws_[i];
    const int bucket = bucket_of(draw);
    const int start = bucket > 0 ? ends_[bucket - 1] : 0, end = ends_[bucket];
    if (end - start == 1) return draw;
    for (int k = start; k < end; ++k) {
      int place = start;
      for (int other = start; other < end; ++other) place += column_of(draws_[other]) < column_of(draws_[k]);
      if (place == i) return draws_[k];
    }
    return draw;  // not reached: columns differ
  }

 private:
  __device__ int bucket_of(const Draw& draw) const {
    const uint32_t hash = static_cast<uint32_t>(column_of(draw)) * 0x9E3779B1u;  // 2^32 over the golden ratio
    return static_cast<int>(__umulhi(hash, static_cast<uint32_t>(buckets_)));
  }

  __device__ void counts_to_starts() {
    using Scan = cub::BlockScan<int, kThreads>;
    __shared__ typename Scan::TempStorage scratch;
    const int each = (buckets_ + kThreads - 1) / kThreads;
    const int first = min(static_cast<int>(threadIdx.x) * each, buckets_), last = min(first + each, buckets_);
    int own = 0, before = 0;
    for (int b = first; b < last; ++b) own += ends_[b];
    Scan(scratch).ExclusiveSum(own, before);
    for (int b = first; b < last; ++b) {
      const int count = ends_[b];
      ends_[b] = before;
      before += count;
    }
  }

  int buckets_;
  int32_t* ends_;
  Draw* draws_;
};

// Arguments of the kernel besides the arena.
struct Reweight {
  uint32_t first_stream;  // global number of column 0
  bool base_2;            // the lse estimate is its rounded_offset()
  LogitTransform<float> transform;
  int32_t* out_count;   // Buffers::kept_count, or null
  float* out_variance;  // Buffers::draw_variance, or null
};

// Numbers of a row that all its elements need.
struct Row {
  float lse, lse_residual, p_over_q, inverse_cap;
  RowCoefficients<float> k;
  uint32_t bits;

  // Without a softcap this is 1 even at an infinite logit.
  __device__ float slope(float z) const { return inverse_cap == 0 ? 1 : softcap_slope(z, inverse_cap); }
  __device__ float log_p(float z) const { return (z - lse) - lse_residual; }
  // The factor of p.
  __device__ float factor(float z) const { return probability_factor(k, log_p(z)) * slope(z); }
};

__device__ Row load_row(const SparsifiedArena& t, const Reweight& w, int64_t r) {
  const Arena& a = t.base;
  const DrawLists& lists = t.lists;
  Row row{};
  row.lse = a.lse[r];
  row.lse_residual = a.lse_residual[r];
  // In two parts: if both are huge, their sums would lose all digits of the difference.
  LogSumExp<double> lse_estimate{lists.lse_estimate[r], lists.lse_estimate_residual[r]};
  if (w.base_2) {
    const SplitOffset split = split_offset(lists.lse_estimate[r], lists.lse_estimate_residual[r]);
    lse_estimate = {split.far, -double{split.shift} / double{kLog2E}};
  }
  row.p_over_q =
      expf(static_cast<float>((lse_estimate.high - row.lse) + (lse_estimate.low - row.lse_residual)));
  row.k = {a.a[r], a.b != nullptr ? a.b[r] : 0, 0, a.g[r]};
  row.inverse_cap = inverse_softcap(w.transform.softcap * w.transform.inverse_temperature_of(r));
  row.bits = draw_row_bits(*lists.seed, static_cast<uint32_t>(r));
  return row;
}

// One block for each row: orders its list, draws again, and writes each kept element's part of dz.
__global__ void __launch_bounds__(kThreads) reweight_kernel(SparsifiedArena t, Reweight w) {
  const DrawLists& lists = t.lists;
  Draw* const shared = dynamic_shared<Draw>();
  const int64_t r = blockIdx.x;
  const int32_t target = t.base.target[r];
  const int thread = static_cast<int>(threadIdx.x);
  if (target == kIgnoredRow) {
    if (thread != 0) return;
    t.kept_count[r] = 0;
    if (w.out_count != nullptr) w.out_count[r] = 0;
    if (w.out_variance != nullptr) w.out_variance[r] = 0;
    return;
  }
  // Loads come before barriers, so that none waits behind them.
  const Row row = load_row(t, w, r);
  const float target_logit = lists.target_logit[r];
  const bool dense = target >= 0 && t.role[target] >= 0;
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
  if (w.out_variance != nullptr) {
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
    if (t.lists_columns) atomicAdd(t.column_count + target, 1);
  }
  t.kept_count[r] = count;
  if (w.out_count != nullptr) w.out_count[r] = count + static_cast<int32_t>(t.sizes.dense);
  if (w.out_variance == nullptr) return;
  w.out_variance[r] = variance;
  t.row_threshold[r] = square + (dense ? 0 : target_value * target_value);
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
                   .out_count = run.buffers.kept_count,
                   .out_variance = static_cast<float*>(run.buffers.draw_variance)};
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
