#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/block/block_scan.cuh>
#include <cub/device/device_scan.cuh>

#include "cuda/check.h"
#include "cuda/rows/device_rows.cuh"
#include "cuda/thinned/thinned.h"

namespace headroom::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBins = 1024;  // of counts; higher ones are in the last

__global__ void count_targets_kernel(const int32_t* target, int64_t tokens, int32_t* count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < tokens && target[i] >= 0) atomicAdd(count + target[i], 1);
}

__device__ int bin_of(int32_t count) {
  return min(count, kBins - 1);
}

// How many columns have each count above 0.
__global__ void count_bins_kernel(const int32_t* count, int64_t vocab, int32_t* bins) {
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j < vocab && count[j] > 0) atomicAdd(bins + bin_of(count[j]), 1);
}

// bins[kBins]: the highest bin of which not all columns can be dense; of thread t the bin kBins - 1 - t.
__global__ void __launch_bounds__(kBins) find_cutoff_kernel(int32_t* bins, int64_t dense) {
  using Scan = cub::BlockScan<int32_t, kBins>;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ int fit;  // bins that fit, from the highest on
  const int thread = static_cast<int>(threadIdx.x);
  int32_t above = 0;  // and in the bin itself
  Scan(scratch).InclusiveSum(bins[kBins - 1 - thread], above);
  if (thread == 0) fit = 0;
  __syncthreads();
  if (above <= dense) atomicMax(&fit, thread + 1);
  __syncthreads();
  if (thread == 0) bins[kBins] = max(kBins - 1 - fit, 0);
}

// Columns above the cutoff in the upper half, those at it in the lower: one scan ranks both.
struct RankTerm {
  const int32_t* count;
  const int32_t* cutoff;
  __device__ uint64_t operator()(int64_t j) const {
    const int bin = bin_of(count[j]);
    return static_cast<uint64_t>(bin > *cutoff) << 32 | static_cast<uint64_t>(bin == *cutoff);
  }
};

auto rank_input(const int32_t* count, const int32_t* cutoff) {
  return thrust::make_transform_iterator(thrust::make_counting_iterator(int64_t{0}), RankTerm{count, cutoff});
}

__global__ void assign_dense_kernel(ChooseColumns c) {
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j >= c.vocab) return;
  const int32_t cutoff = c.bins[kBins];
  const RankTerm term{c.count, &cutoff};
  const uint64_t total = c.rank[c.vocab - 1] + term(c.vocab - 1);
  const int64_t above = static_cast<int64_t>(c.rank[j] >> 32), equal = static_cast<uint32_t>(c.rank[j]);
  const int64_t room =
      c.dense - static_cast<int64_t>(total >> 32);  // for columns at the cutoff: the first ones
  const int bin = bin_of(c.count[j]);
  const bool chosen = bin > cutoff || (bin == cutoff && equal < room);
  const int64_t number = above + min(equal, room);
  c.role[j] = chosen ? static_cast<int32_t>(number) : -1;
  if (chosen) c.dense_columns[number] = static_cast<int32_t>(j);
}

// Sample s: the first column of the s-th of equal stretches that is not dense. Without any it is a dense one,
// which its role tells.
__global__ void sample_columns_kernel(ChooseColumns c) {
  const int64_t s = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (s >= c.sampled) return;
  const int64_t end = (s + 1) * c.vocab / c.sampled;
  int64_t j = s * c.vocab / c.sampled;
  while (j < end && c.role[j] >= 0) ++j;
  c.sample[s] = static_cast<int32_t>(j < end ? j : s * c.vocab / c.sampled);
  if (j < end) c.role[j] = static_cast<int32_t>(-2 - s);
}

__global__ void dense_roles_kernel(const int32_t* dense_columns, int64_t dense, int32_t* role) {
  const int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (k < dense) role[dense_columns[k]] = static_cast<int32_t>(k);
}

__global__ void dense_targets_kernel(const int32_t* role, const int32_t* target, int32_t* dense_target,
                                     int64_t tokens) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= tokens) return;
  const int32_t y = target[i];
  dense_target[i] = y == kIgnoredRow ? kIgnoredRow : y >= 0 ? max(role[y], -1) : -1;
}

__global__ void store_seed_kernel(int64_t value, const int64_t* given, uint64_t* seed) {
  *seed = static_cast<uint64_t>(given != nullptr ? *given : value);
}

__global__ void gather_vector_kernel(const float* vector, const int32_t* columns, int64_t count,
                                     const int32_t* role, float* out) {
  const int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (k >= count) return;
  const bool exists = role == nullptr || role[columns[k]] < 0;
  out[k] = !exists ? -CUDART_INF_F : vector != nullptr ? vector[columns[k]] : 0.0f;
}

}  // namespace

void launch_choose_columns(const ChooseColumns& c, cudaStream_t stream) {
  const unsigned blocks = blocks_for(c.vocab, kThreads);
  check(cudaMemsetAsync(c.count, 0, static_cast<size_t>(c.vocab) * sizeof(int32_t), stream),
        "counts of targets");
  check(cudaMemsetAsync(c.bins, 0, (kBins + 1) * sizeof(int32_t), stream), "bins of counts");
  count_targets_kernel<<<blocks_for(c.tokens, kThreads), kThreads, 0, stream>>>(c.target, c.tokens, c.count);
  count_bins_kernel<<<blocks, kThreads, 0, stream>>>(c.count, c.vocab, c.bins);
  find_cutoff_kernel<<<1, kBins, 0, stream>>>(c.bins, c.dense);
  size_t bytes = c.scan_bytes;
  check(cub::DeviceScan::ExclusiveSum(c.scan, bytes, rank_input(c.count, c.bins + kBins), c.rank, c.vocab,
                                      stream),
        "ranks of columns");
  assign_dense_kernel<<<blocks, kThreads, 0, stream>>>(c);
  if (c.sampled > 0) sample_columns_kernel<<<blocks_for(c.sampled, kThreads), kThreads, 0, stream>>>(c);
  check_launch("choose_columns");
}

void launch_assign_roles(const int32_t* dense_columns, int64_t dense, int32_t* role, int64_t vocab,
                         const int32_t* target, int32_t* dense_target, int64_t tokens, cudaStream_t stream) {
  check(cudaMemsetAsync(role, 0xff, static_cast<size_t>(vocab) * sizeof(int32_t), stream),
        "roles of columns");
  dense_roles_kernel<<<blocks_for(dense, kThreads), kThreads, 0, stream>>>(dense_columns, dense, role);
  dense_targets_kernel<<<blocks_for(tokens, kThreads), kThreads, 0, stream>>>(role, target, dense_target,
                                                                              tokens);
  check_launch("assign_roles");
}

void launch_store_seed(int64_t value, const int64_t* given, uint64_t* seed, cudaStream_t stream) {
  store_seed_kernel<<<1, 1, 0, stream>>>(value, given, seed);
  check_launch("store_seed");
}

void launch_gather_vector(const float* vector, const int32_t* columns, int64_t count, const int32_t* role,
                          float* out, cudaStream_t stream) {
  gather_vector_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(vector, columns, count, role,
                                                                             out);
  check_launch("gather_vector");
}

}  // namespace headroom::cuda
