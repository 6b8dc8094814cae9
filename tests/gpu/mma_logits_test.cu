// The mma kernels on devices of different sizes: both numbers of stages, few processors, depths and columns
// that no tile divides, rows that do not exist, and blocks of rows that stay as they are.
// Compiled for the CPU as well as for a GPU.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "core/row_stats.h"
#include "cuda/engines/mma/launch.h"
#include "cuda/rows/logit_offset.h"
#include "cuda/rows/rows.h"
#include "cuda/runtime/queue.h"
#include "guarded.h"

namespace logitless::cuda::mma::test {
namespace {

using namespace cuda::test;

struct Shape {
  int64_t rows, columns, depth;
};

// Rows of bf16 with NaN behind them, where nothing may read, and their exact products.
struct Problem {
  explicit Problem(Shape given)
      : shape(given),
        stride((given.depth + 7) / 8 * 8 + 8),
        hidden(make(given.rows, 1)),
        weight(make(given.columns, 2)) {}

  std::vector<uint16_t> make(int64_t rows, unsigned seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1.5f / std::sqrt(std::sqrt(static_cast<float>(shape.depth))));
    std::vector<uint16_t> bits(static_cast<size_t>(rows * stride), float_to_bf16(NAN));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < shape.depth; ++k) bits[i * stride + k] = float_to_bf16(normal(random));
    }
    return bits;
  }
  double dot(int64_t row, int64_t column) const {
    double sum = 0;
    for (int64_t k = 0; k < shape.depth; ++k) {
      sum += double{bf16_to_float(hidden[row * stride + k])} * bf16_to_float(weight[column * stride + k]);
    }
    return sum;
  }
  // The error of a sum of at most so many roundings of terms whose sizes sum up to about 3.
  double error() const { return 4 * std::ceil(static_cast<double>(shape.depth) / 8) * 0x1p-24 * 8; }

  Shape shape;
  int64_t stride;
  std::vector<uint16_t> hidden, weight;
};

LogitsArgs args_of(const Problem& problem, const Guarded<uint16_t>& hidden, const Guarded<uint16_t>& weight) {
  LogitsArgs args;
  args.hidden = hidden.get();
  args.weight = weight.get();
  args.hidden_stride = args.weight_stride = problem.stride;
  args.rows = problem.shape.rows;
  args.columns = problem.shape.columns;
  args.depth = problem.shape.depth;
  return args;
}

// A device with no more than these; the test's own device has at least as much.
Device small_device(int processors, int stages) {
  Device device;
  device.capability = 80;
  device.processors = processors;
  device.shared_bytes = shared_bytes(stages);
  device.l2_bytes = 1 << 20;
  return device;
}

class Logits : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
    if (stages_of(query_device(0).shared_bytes) < std::get<1>(GetParam())) GTEST_SKIP() << "shared memory";
    device = small_device(std::get<0>(GetParam()), std::get<1>(GetParam()));
  }

  Device device;
};

// The last shapes have whole tiles, so deep that copies of one follow those of another.
const std::vector<Shape> kShapes{{1, 1, 8},       {300, 500, 20},  {257, 193, 96},  {520, 960, 33},
                                 {130, 400, 200}, {512, 384, 160}, {600, 600, 256}, {1024, 200, 96}};

TEST_P(Logits, StatisticsOfEveryRow) {
  for (const Shape& shape : kShapes) {
    const Problem problem(shape);
    const Guarded<uint16_t> hidden(problem.hidden), weight(problem.weight);
    std::vector<int32_t> targets(static_cast<size_t>(shape.rows));
    for (int64_t i = 0; i < shape.rows; ++i) targets[i] = static_cast<int32_t>(i * 7 % shape.columns);
    const Guarded<int32_t> target(targets);
    const Guarded<float> target_logit(std::vector<float>(static_cast<size_t>(shape.rows), NAN));
    LogitsArgs args = args_of(problem, hidden, weight);
    args.target = target.get();
    args.of_epilogue = StatsArgs{};
    const int partials = plan_logits(args, device, false).partials;
    const size_t count = static_cast<size_t>(partials * shape.rows);
    const Guarded<float> max(std::vector<float>(count, -INFINITY)), sum(std::vector<float>(count, 0.0f));
    StatsArgs stats;
    stats.stats = {.partials = partials, .stride = shape.rows, .max = max.get(), .sum = sum.get()};
    stats.target_logit = target_logit.get();
    args.of_epilogue = stats;
    launch_logits(args, device, Queue(cudaStream_t{}));

    for (const auto* array : {&max, &sum, &target_logit}) array->expect_guards();
    const auto maxima = max.read(), sums = sum.read(), at_target = target_logit.read();
    for (int64_t i = 0; i < shape.rows; ++i) {
      RowStats<double> got, truth;
      for (int64_t s = 0; s < partials; ++s) {
        got = merge(got, {.max = maxima[s * shape.rows + i], .sum_exp = sums[s * shape.rows + i]});
      }
      for (int64_t j = 0; j < shape.columns; ++j)
        truth = merge(truth, {.max = problem.dot(i, j), .sum_exp = 1});
      ASSERT_NEAR(got.max, truth.max, problem.error()) << "row " << i << " of " << shape.rows;
      // exp2 and sums add less than 2^-17.
      ASSERT_NEAR(log_sum_exp(got), log_sum_exp(truth), problem.error() + 0x1p-17) << "row " << i;
      ASSERT_NEAR(at_target[i], problem.dot(i, targets[i]), problem.error()) << "row " << i;
    }
  }
}

// dz = exp(z - lse) of every element: each in its place, nothing beside them.
TEST_P(Logits, StoresEveryElementInItsPlace) {
  for (const Shape& shape : kShapes) {
    const Problem problem(shape);
    const Guarded<uint16_t> hidden(problem.hidden), weight(problem.weight);
    const int64_t stride = (shape.columns + 7) / 8 * 8 + 8;
    const uint16_t untouched = 0x1234;
    const Guarded<uint16_t> dz(std::vector<uint16_t>(static_cast<size_t>(shape.rows * stride), untouched));
    const Guarded<float> lse(std::vector<float>(static_cast<size_t>(shape.rows), 2.0f));
    const Guarded<float> ones(std::vector<float>(static_cast<size_t>(shape.rows), 1.0f));
    // Rows from row_count on are zeros up to the end of their block of 128. The other blocks stay as they
    // are.
    const int32_t rows = static_cast<int32_t>(shape.rows > 128 ? shape.rows - 120 : shape.rows);
    const Guarded<int32_t> row_count(std::vector<int32_t>{rows});
    std::vector<uint8_t> some_active(static_cast<size_t>((shape.rows + 127) / 128), 1);
    if (some_active.size() > 2) some_active[1] = 0;
    const Guarded<uint8_t> active(some_active);
    LogitsArgs args = args_of(problem, hidden, weight);
    args.row_count = row_count.get();
    args.row_block_active = active.get();
    GradientArgs gradient;
    gradient.lse = lse.get();
    gradient.a = ones.get();
    gradient.g = ones.get();
    gradient.dz = {.data = dz.get(), .columns = shape.columns, .stride = stride};
    args.of_epilogue = gradient;
    launch_logits(args, device, Queue(cudaStream_t{}));

    dz.expect_guards();
    const auto got = dz.read();
    const int64_t clip = (shape.columns + 7) / 8 * 8;
    for (int64_t i = 0; i < shape.rows; ++i) {
      const bool stays = some_active[i / 128] == 0 || i / 128 * 128 >= rows;
      for (int64_t j = 0; j < stride; ++j) {
        const uint16_t bits = got[i * stride + j];
        if (stays || j >= clip) {
          ASSERT_EQ(bits, untouched) << i << ", " << j;
        } else if (i >= rows) {
          ASSERT_EQ(bits & 0x7fff, 0) << i << ", " << j;
        } else if (j < shape.columns) {
          const double truth = std::exp(problem.dot(i, j) - 2);
          ASSERT_NEAR(bf16_to_float(bits), truth, truth * (0x1p-8 + 2 * problem.error())) << i << ", " << j;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Logits,
                         testing::Combine(testing::Values(1, 3, 7),
                                          testing::Values(kFewStages, kMostStages)));

}  // namespace
}  // namespace logitless::cuda::mma::test
