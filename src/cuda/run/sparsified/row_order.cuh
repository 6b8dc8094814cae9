#pragma once
#include <cub/block/block_scan.cuh>

#include "cuda/rows/logit_offset.h"
#include "cuda/rows/softcap.h"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {

// The order of a row's draws. They arrive in any order, and get one that depends on their columns alone,
// which makes sums repeatable: by range of columns, by a hash of the column, and by column for equal hashes.
// Most hashes have at most one draw (in lists of up to kMostBuckets), so this takes a few steps for each
// draw. Sorting would take the square of the number of doublings of the list.
constexpr int kMostBuckets = 2048;

// As many buckets as draws, rounded up to a power of two, but at most kMostBuckets.
__host__ __device__ inline int row_buckets(int draws) {
  int buckets = 2;
  while (buckets < draws && buckets < kMostBuckets) buckets *= 2;
  return buckets;
}

// Shared memory for rows of at most `draws`.
inline size_t row_order_bytes(int draws) {
  return static_cast<size_t>(draws) * sizeof(Draw) +
         static_cast<size_t>(row_buckets(draws)) * sizeof(int32_t);
}

__device__ inline int32_t column_of(const Draw& draw) {
  return static_cast<int32_t>(static_cast<uint32_t>(draw.column_and_certain) >> 1);
}

// Used by a whole block of kThreads.
template <int kThreads>
class RowOrder {
 public:
  // `shared` has row_order_bytes() and is aligned like Draw.
  __device__ RowOrder(const Draw* draws, int count, void* shared, ColumnRanges ranges = {})
      : ranges_(ranges),
        buckets_(row_buckets(count)),
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
    const auto column = static_cast<uint32_t>(column_of(draw));
    const uint32_t hash = column * 0x9E3779B1u;  // 2^32 over the golden ratio
    const uint64_t key = (uint64_t{column >> ranges_.shift} << 32 | hash) >> ranges_.bits;
    return static_cast<int>(__umulhi(static_cast<uint32_t>(key), static_cast<uint32_t>(buckets_)));
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

  ColumnRanges ranges_;
  int buckets_;
  int32_t* ends_;
  Draw* draws_;
};

// t'(z) of a row's logits. Without a softcap it is 1 even at an infinite logit.
class RowSlope {
 public:
  __device__ RowSlope(const LogitTransform<float>& transform, int64_t row)
      : inverse_cap_(inverse_softcap(transform.softcap * transform.inverse_temperature_of(row))) {}
  __device__ float operator()(float z) const {
    return inverse_cap_ == 0 ? 1 : softcap_slope(z, inverse_cap_);
  }

 private:
  float inverse_cap_;
};

// p / q of a row's elements: exp(lse_estimate - lse). base_2: the lse estimate is its rounded_offset().
__device__ inline float p_over_q_of(const SparsifiedArena& t, bool base_2, int64_t r) {
  const DrawLists& lists = t.lists;
  // In two parts: if both are huge, their sums would lose all digits of the difference.
  LogSumExp<double> lse_estimate{lists.lse_estimate[r], lists.lse_estimate_residual[r]};
  if (base_2) {
    const SplitOffset split = split_offset(lists.lse_estimate[r], lists.lse_estimate_residual[r]);
    lse_estimate = {split.far, -double{split.shift} / double{kLog2E}};
  }
  return expf(
      static_cast<float>((lse_estimate.high - t.base.lse[r]) + (lse_estimate.low - t.base.lse_residual[r])));
}

}  // namespace logitless::cuda
