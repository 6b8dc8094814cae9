// Multiplies gradients by an upstream gradient that only the device knows.
#include <algorithm>

#include "cuda/rows/vector8.cuh"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kMostBlocks = 1024;  // of an array
constexpr size_t kArrays = 4;           // of one launch: all gradients of a run

struct Arrays {
  GradientArray of[kArrays];
};

// 0 stays 0, whatever the factor.
__device__ void scale_by(double* x, double by) {
  if (*x != 0) *x *= by;
}

template <class T>
__device__ void scale_by(T* x, float by) {
  const float value = to_float(*x);
  if (value != 0) *x = from_float<T>(value * by);
}

// Scales pieces of 8 elements, then the rest; an array that does not begin at a multiple of 16 bytes has no
// pieces.
template <class T, class Factor>
__device__ void scale_unless_one(const GradientArray& array, const void* factor) {
  const Factor by = *static_cast<const Factor*>(factor);
  if (by == 1) return;
  T* data = static_cast<T*>(array.data);
  const int64_t step = int64_t{gridDim.x} * kThreads, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t pieces = reinterpret_cast<uintptr_t>(data) % 16 == 0 ? array.size / 8 : 0;
  for (int64_t i = thread; i < pieces; i += step) {
    auto& piece = reinterpret_cast<Vector8<T>*>(data)[i];
    Vector8<T> scaled = piece;
#pragma unroll
    for (int k = 0; k < 8; ++k) scale_by(&scaled.x[k], by);
    piece = scaled;
  }
  for (int64_t i = 8 * pieces + thread; i < array.size; i += step) scale_by(data + i, by);
}

// Row y of the grid scales array y.
__global__ void scale_unless_one_kernel(const __grid_constant__ Arrays arrays, const void* factor) {
  const GradientArray& array = arrays.of[blockIdx.y];
  switch (array.dtype) {
    case DType::kF64:
      return scale_unless_one<double, double>(array, factor);
    case DType::kBF16:
      return scale_unless_one<__nv_bfloat16, float>(array, factor);
    case DType::kF16:
      return scale_unless_one<__half, float>(array, factor);
    default:
      return scale_unless_one<float, float>(array, factor);
  }
}

}  // namespace

void launch_scale_unless_one(std::span<const GradientArray> arrays, const void* factor, const Queue& queue) {
  while (!arrays.empty()) {
    const std::span<const GradientArray> some = arrays.first(std::min(kArrays, arrays.size()));
    Arrays given{};
    int64_t longest = 0;
    for (size_t i = 0; i < some.size(); ++i) {
      given.of[i] = some[i];
      longest = std::max(longest, some[i].size);
    }
    const unsigned blocks = std::min(blocks_for(longest, 8 * kThreads), kMostBlocks);
    const dim3 grid(blocks, static_cast<unsigned>(some.size()));
    queue.launch("scale_unless_one", scale_unless_one_kernel, grid, kThreads, 0, given, factor);
    arrays = arrays.subspan(some.size());
  }
}

}  // namespace logitless::cuda
