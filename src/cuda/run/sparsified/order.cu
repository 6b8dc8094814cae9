#include "cuda/rows/device_rows.cuh"
#include "cuda/run/sparsified/sparsified.h"

namespace logitless::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockColumns = 64;  // most columns of a block
constexpr int kRangeWords = 8192;  // of the bitmap of rows in shared memory: 262144 rows at a time

// Sorts short lists, of all columns of a block, with a thread for each element. An element's place is the
// number of rows before its own.
__device__ void order_by_counting(const SparsifiedArena& t, const int32_t* starts, int columns) {
  for (int i = starts[0] + static_cast<int>(threadIdx.x); i < starts[columns]; i += kThreads) {
    const KeptRow own = t.by_column[i];
    int column = 0;  // the last one that starts at i or before
    for (int step = kBlockColumns / 2; step > 0; step /= 2) {
      if (column + step < columns && starts[column + step] <= i) column += step;
    }
    const int start = starts[column], end = starts[column + 1];
    if (end - start > kHeavyColumn) continue;
    int place = start;
    for (int k = start; k < end; ++k) place += t.by_column[k].row < own.row;
    t.sorted[place] = own;
  }
}

// Sorts any list with the whole block. Rows are bits, and a row's place is the number of bits before it.
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

// Called by a warp.
__device__ float sum_of_values(const KeptRow* list, int count) {
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) sum += list[i].value;
  return warp_sum(sum);
}

// A block sorts a few columns; those with long lists one after the other.
__global__ void __launch_bounds__(kThreads)
    order_kernel(SparsifiedArena t, float* d_bias, int block_columns) {
  __shared__ int32_t starts[kBlockColumns + 1];
  const int64_t first = int64_t{blockIdx.x} * block_columns;
  const int columns = static_cast<int>(min(int64_t{block_columns}, t.vocab - first));
  const int thread = static_cast<int>(threadIdx.x);
  if (thread <= columns) starts[thread] = t.column_start[first + thread];
  __syncthreads();
  const bool heavy = thread < columns && starts[thread + 1] - starts[thread] > kHeavyColumn;
  if (heavy) t.heavy[1 + atomicAdd(t.heavy, 1)] = static_cast<int32_t>(first + thread);
  order_by_counting(t, starts, columns);
  if (__syncthreads_or(heavy)) {
    for (int k = 0; k < columns; ++k) {
      const int32_t start = starts[k], count = starts[k + 1] - start;
      if (count > kHeavyColumn) order_by_bitmap(t.by_column + start, t.sorted + start, count, t.rows);
    }
  }
  if (d_bias == nullptr) return;
  for (int k = thread / 32; k < columns; k += kWarps) {
    const float sum = sum_of_values(t.sorted + starts[k], starts[k + 1] - starts[k]);
    if (thread % 32 == 0) d_bias[first + k] += sum;
  }
}

}  // namespace

void launch_order_lists(const SparsifiedArena& t, float* d_bias, const Queue& queue) {
  int block_columns = 8;  // more if that leaves at least 1024 blocks, which keep a whole device busy
  while (block_columns < kBlockColumns && t.vocab / block_columns > 2048) block_columns *= 2;
  queue.launch("order_lists", order_kernel, blocks_for(t.vocab, block_columns), kThreads, 0, t, d_bias,
               block_columns);
}

}  // namespace logitless::cuda
