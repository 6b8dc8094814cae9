#pragma once
// Random problems for the sm90 logits kernels, and their double-precision logits.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cuda/engines/sm90/launch.h"
#include "cuda/rows/rows.h"
#include "cuda/runtime/queue.h"
#include "guarded.h"

namespace logitless::cuda::sm90::test {

using namespace cuda::test;

inline float to_float(uint16_t bits, DType dtype) {
  return dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}
inline uint16_t from_float(float value, DType dtype) {
  return dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
}

inline std::vector<float> random_floats(size_t count, float spread, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal(0.f, spread);
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

// dot[i, j] = E_i . C_j and size[i, j] = sum_k |E_ik C_jk|, which bounds the rounding of any summation order.
static __global__ void dot_kernel(const float* hidden, const float* weight, int64_t rows, int64_t columns,
                                  int64_t depth, double* dot, double* size) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows * columns) return;
  const float* e = hidden + index / columns * depth;
  const float* c = weight + index % columns * depth;
  double sum = 0, magnitude = 0;
  for (int64_t k = 0; k < depth; ++k) {
    const double product = static_cast<double>(e[k]) * c[k];
    sum += product;
    magnitude += fabs(product);
  }
  dot[index] = sum;
  size[index] = magnitude;
}

struct Shape {
  int64_t rows, columns, depth;
};

// Sums the partials [partials][rows] of each row.
inline std::vector<float> joined(const std::vector<float>& partials, int64_t rows) {
  std::vector<float> sums(static_cast<size_t>(rows), 0.f);
  for (size_t k = 0; k < partials.size(); ++k) sums[k % sums.size()] += partials[k];
  return sums;
}

// hidden and weight of a shape, with padded rows, and the exact products.
class Problem {
 public:
  Problem(Shape shape, DType dtype, float logit_spread = 3.f, uint64_t seed = 1)
      : shape(shape), dtype(dtype), stride((shape.depth + 7) / 8 * 8 + 8) {
    const float spread = std::sqrt(logit_spread / std::sqrt(static_cast<float>(shape.depth)));
    hidden_bits = make(shape.rows, spread, seed, &hidden_values);
    weight_bits = make(shape.columns, spread, seed + 1000, &weight_values);
    const Guarded<float> e(hidden_values), c(weight_values);
    const size_t count = static_cast<size_t>(shape.rows) * shape.columns;
    const Guarded<double> device_dot(count), device_size(count);
    dot_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        e.get(), c.get(), shape.rows, shape.columns, shape.depth, device_dot.get(), device_size.get());
    check_cuda(cudaDeviceSynchronize());
    dot = device_dot.read();
    size = device_size.read();
  }

  Shape shape;
  DType dtype;
  int64_t stride;
  std::vector<uint16_t> hidden_bits, weight_bits;
  std::vector<float> hidden_values, weight_values;
  std::vector<double> dot, size;

 private:
  // Rows of `stride` elements, NaN between depth and stride: nothing may read there.
  std::vector<uint16_t> make(int64_t rows, float spread, uint64_t seed, std::vector<float>* values) const {
    *values = random_floats(static_cast<size_t>(rows) * shape.depth, spread, seed);
    std::vector<uint16_t> bits(static_cast<size_t>(rows) * stride, from_float(NAN, dtype));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < shape.depth; ++k) {
        float& value = (*values)[i * shape.depth + k];
        bits[i * stride + k] = from_float(value, dtype);
        value = to_float(bits[i * stride + k], dtype);
      }
    }
    return bits;
  }
};

// Options of the transform, and the exact logit with the error that fp32 arithmetic may make of it.
struct Transform {
  float scale = 1, softcap = 0;
  std::vector<float> bias;

  double logit(const Problem& problem, int64_t i, int64_t j) const {
    double x = scale * problem.dot[i * problem.shape.columns + j] + (bias.empty() ? 0.0 : bias[j]);
    return softcap == 0 ? x : softcap * std::tanh(x / softcap);
  }
  // A tensor core truncates the running sum once for 16 products, and no running sum passes the sum of
  // magnitudes; 1e-6 of softcap is the transform's own bound.
  double error(const Problem& problem, int64_t i, int64_t j) const {
    const double magnitude = std::abs(scale) * problem.size[i * problem.shape.columns + j] +
                             (bias.empty() ? 0.0 : std::abs(bias[j]));
    const double steps = static_cast<double>(problem.shape.depth) / 16 + 4;
    return steps * 0x1p-23 * magnitude + 1e-6 * softcap + 0x1p-22 * std::abs(logit(problem, i, j));
  }
};

inline constexpr Shape kShapes[] = {{1, 1, 8},         {1, 191, 64},     {127, 8, 72},     {129, 193, 64},
                                    {1000, 5000, 72},  {257, 192, 8},    {128, 5000, 64},  {1000, 193, 2304},
                                    {300, 3000, 2304}, {3000, 700, 128}, {300, 500, 3072}, {2100, 200, 3080}};

inline std::string name_of(const testing::TestParamInfo<Shape>& info) {
  return std::to_string(info.param.rows) + "x" + std::to_string(info.param.columns) + "x" +
         std::to_string(info.param.depth);
}

// The columns of a problem begin here in its shard.
inline constexpr int32_t kColumnOffset = 100;

// Targets as columns of the shard: all over the problem's columns, some right before and right after them,
// some in another shard, some rows ignored.
inline std::vector<int32_t> make_targets(Shape shape, bool ignored) {
  std::mt19937 engine(7);
  std::vector<int32_t> targets(shape.rows);
  for (int32_t& target : targets) {
    const int kind = static_cast<int>(engine() % 10);
    target = kColumnOffset + static_cast<int32_t>(engine() % shape.columns);
    if (kind == 0) target = -1;
    if (kind == 1) target = kColumnOffset - 1;
    if (kind == 2) target = kColumnOffset + static_cast<int32_t>(shape.columns);
    if (kind == 3) target = 0;
    if (kind == 4 && ignored) target = kIgnoredRow;
  }
  return targets;
}

inline Transform make_transform(Shape shape, bool general) {
  Transform transform;
  transform.scale = general ? -0.7f : 1.25f;
  if (!general) return transform;
  transform.softcap = 5;
  transform.bias = random_floats(shape.columns, 1.f, 11);
  return transform;
}

inline LogitsProduct make_product(const Problem& problem, const Guarded<uint16_t>& hidden,
                                  const Guarded<uint16_t>& weight, const Transform& transform) {
  LogitsProduct product;
  product.dtype = problem.dtype;
  product.hidden = hidden.get();
  product.weight = weight.get();
  product.hidden_stride = product.weight_stride = problem.stride;
  product.rows = problem.shape.rows;
  product.columns = problem.shape.columns;
  product.depth = problem.shape.depth;
  product.column_offset = kColumnOffset;
  product.transform.scale = transform.scale;
  product.transform.softcap = transform.softcap;
  return product;
}

inline int processors() {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0);
  return count;
}

template <class T>
class OnHopper : public testing::TestWithParam<T> {
 protected:
  void SetUp() override {
    cudaDeviceProp properties{};
    if (has_gpu()) check_cuda(cudaGetDeviceProperties(&properties, 0));
    if (properties.major != 9) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
};

}  // namespace logitless::cuda::sm90::test
