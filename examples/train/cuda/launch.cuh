#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "train/cuda/check.h"
#include "train/cuda/kernel_pointer.h"

namespace logitless::train::cuda {

inline constexpr int kThreads = 256;  // of every block

// kernel<<<blocks, kThreads, 0, stream>>>(arguments...)
template <class... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
            const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  check(cudaLaunchKernelExC(&config, kernel_pointer(kernel), pointers), name);
}

// Blocks for one thread an element; of more than a device needs to be busy, each thread takes several.
inline int64_t blocks_for(int64_t elements) {
  constexpr int64_t kMost = 4096;
  return std::clamp<int64_t>((elements + kThreads - 1) / kThreads, 1, kMost);
}

// for (i = first_element(); i < elements; i += stride_of_elements()) ...
__device__ inline int64_t first_element() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ inline int64_t stride_of_elements() {
  return static_cast<int64_t>(gridDim.x) * kThreads;
}

// The sum of all threads' values, in every thread; the order depends on nothing.
__device__ inline float block_sum(float value) {
  __shared__ float values[kThreads];
  __syncthreads();  // the last call's values have been read
  values[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
  }
  __syncthreads();
  return values[0];
}

// The largest, in the same way.
__device__ inline float block_max(float value) {
  __shared__ float values[kThreads];
  __syncthreads();
  values[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] = fmaxf(values[threadIdx.x], values[threadIdx.x + half]);
  }
  __syncthreads();
  return values[0];
}

}  // namespace logitless::train::cuda
