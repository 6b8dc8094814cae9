#include "cuda/check.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/thinned/thinned.h"

namespace headroom::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRangeWords = 8192;  // of the bitmap of rows in shared memory: 262144 rows at a time

// Lists of few elements, by a warp: each element's place is how many rows come before its own.
__device__ void order_by_counting(const KeptRow* list, KeptRow* sorted, int count, int lane) {
  for (int i = lane; i < count; i += 32) {
    const KeptRow own = list[i];
    int place = 0;
    for (int k = 0; k < count; ++k) place += list[k].row < own.row;
    sorted[place] = own;
  }
}

// Any list, by the whole block: rows are bits, and a row's place is the number of bits before it.
__device__ void order_by_bitmap(const KeptRow* list, KeptRow* sorted, int count, int64_t rows) {
  __shared__ uint32_t bits[kRangeWords];
  __shared__ int before[kRangeWords / 32];  // bits before each 32 words
  __shared__ int total;
  int done = 0;
  for (int64_t first = 0; first < rows; first += int64_t{kRangeWords} * 32) {
    for (int i = static_cast<int>(threadIdx.x); i < kRangeWords; i += kThreads) bits[i] = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const int64_t bit = list[i].row - first;
      if (bit >= 0 && bit < int64_t{kRangeWords} * 32) atomicOr(bits + bit / 32, 1u << (bit % 32));
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kRangeWords / 32; i += kThreads) {
      int sum = 0;
      for (int k = 0; k < 32; ++k) sum += __popc(bits[32 * i + k]);
      before[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int sum = done;
      for (int& part : before) {
        const int own = part;
        part = sum;
        sum += own;
      }
      total = sum;
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      const KeptRow own = list[i];
      const int64_t bit = own.row - first;
      if (bit < 0 || bit >= int64_t{kRangeWords} * 32) continue;
      const int word = static_cast<int>(bit / 32);
      int place = before[word / 32] + __popc(bits[word] & ((1u << (bit % 32)) - 1));
      for (int k = word / 32 * 32; k < word; ++k) place += __popc(bits[k]);
      sorted[place] = own;
    }
    __syncthreads();
    done = total;
  }
}

// A warp a column; columns of long lists by the whole block, one after the other.
__global__ void __launch_bounds__(kThreads) order_kernel(OrderLists o) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t first = int64_t{blockIdx.x} * kWarps;
  const int64_t own = first + warp;
  bool any_heavy = false;
  if (own < o.vocab) {
    const int32_t start = o.column_start[own], count = o.column_start[own + 1] - start;
    any_heavy = count > kHeavyColumn;
    if (!any_heavy) {
      order_by_counting(o.by_column + start, o.sorted + start, count, lane);
    } else if (lane == 0) {
      o.heavy[atomicAdd(o.heavy_count, 1)] = static_cast<int32_t>(own);
    }
  }
  if (__syncthreads_or(any_heavy)) {
    for (int64_t column = first; column < min(first + kWarps, o.vocab); ++column) {
      const int32_t start = o.column_start[column], count = o.column_start[column + 1] - start;
      if (count > kHeavyColumn) order_by_bitmap(o.by_column + start, o.sorted + start, count, o.rows);
    }
  }
  if (o.d_bias == nullptr || own >= o.vocab) return;
  __syncwarp();
  float sum = 0;
  for (int32_t i = o.column_start[own] + lane; i < o.column_start[own + 1]; i += 32) sum += o.sorted[i].value;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) o.d_bias[own] += sum;
}

}  // namespace

void launch_order_lists(const OrderLists& o, cudaStream_t stream) {
  check(cudaMemsetAsync(o.heavy_count, 0, sizeof(int32_t), stream), "count of heavy columns");
  order_kernel<<<blocks_for(o.vocab, kWarps), kThreads, 0, stream>>>(o);
  check_launch("order_lists");
}

}  // namespace headroom::cuda
