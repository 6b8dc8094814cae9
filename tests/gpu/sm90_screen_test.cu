// Draws from e4m3 operands: every logit against a float64 product of the same numbers. The draw itself is
// that of 16-bit operands (sm90_draw_test.cu).
#include <map>

#include "core/fp8.h"
#include "sm90_fixture.cuh"

namespace logitless::cuda::sm90::test {
namespace {

// All logits are listed with such a threshold, and the expected number of elements is exact.
constexpr float kTiny = 0x1p-120f;
constexpr float kUntouched = 12345;  // a launch does not write it

// dot[i, j], and a bound of the tensor core's error. An instruction aligns its 32 products and its running
// sum with the largest of them and truncates each at 14 bits, two of which may be left of the point. It may
// take two halves one after the other, and round the sum to as many bits.
__global__ void bounded_dot_kernel(const float* hidden, const float* weight, int64_t rows, int64_t columns,
                                   int64_t depth, double* dot, double* bound) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows * columns) return;
  const float* e = hidden + index / columns * depth;
  const float* c = weight + index % columns * depth;
  double sum = 0, error = 0;
  for (int64_t first = 0; first < depth; first += 32) {
    double largest = fabs(sum);
    for (int64_t k = first; k < depth && k < first + 32; ++k) {
      const double product = static_cast<double>(e[k]) * c[k];
      sum += product;
      largest = fmax(largest, fmax(fabs(product), fabs(sum)));
    }
    error += (32 + 2 * 2) * 0x1p-12 * (largest + error);
  }
  dot[index] = sum;
  bound[index] = error;
}

// Rows of e4m3 numbers with NaN behind them, where nothing may read, and factors of the rows.
struct Operand {
  Operand(int64_t rows, int64_t depth, bool is_exact, float spread, unsigned seed)
      : stride((depth + 15) / 16 * 16 + 16) {
    std::map<float, uint8_t> bits_of;
    for (int bits = 0; bits < 127; ++bits) {
      const int exponent = bits >> 3, mantissa = bits & 7;
      const float number = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                         : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      bits_of[number] = static_cast<uint8_t>(bits);
      bits_of[-number] = static_cast<uint8_t>(number == 0 ? 0 : 128 + bits);
    }
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, spread);
    const float few[] = {-2, -1, -0.5f, 0, 0.5f, 1, 2};
    bytes.assign(static_cast<size_t>(rows * stride), 0x7f);
    for (int64_t i = 0; i < rows; ++i) {
      factors.push_back(std::ldexp(1.f, static_cast<int>(random() % 3) - 1));
      for (int64_t k = 0; k < depth; ++k) {
        const float number = is_exact ? few[random() % 7] : round_to_fp8(normal(random));
        numbers.push_back(number);
        bytes[i * stride + k] = bits_of.at(number);
      }
    }
  }

  int64_t stride;
  std::vector<uint8_t> bytes;
  std::vector<float> numbers, factors;
};

struct Wishes {
  bool general = false;
  bool exact = false;  // products whose sums the tensor core does not round
  int64_t rows = -1;   // that exist; -1: all
};

class Screen {
 public:
  Screen(Shape shape, const Wishes& wishes)
      : shape_(shape),
        wishes_(wishes),
        hidden_(shape.rows, shape.depth, wishes.exact, 2.f, 1),
        weight_(shape.columns, shape.depth, wishes.exact, 2.f, 2),
        targets_(make_targets(shape, true)) {
    if (wishes_.rows < 0) wishes_.rows = shape.rows;
    // Logits of about 2 times the factors.
    const double spread = (wishes.exact ? 1.5 : 4) * std::sqrt(static_cast<double>(shape.depth));
    transform_.scale = std::exp2(static_cast<float>(std::round(std::log2(1.5 / spread))));
    if (wishes.general) {
      transform_.scale *= -0.7f;
      transform_.softcap = 5;
      transform_.bias = random_floats(shape.columns, 1.f, 11);
    }
    for (int64_t i = 0; i < shape.rows; ++i) {  // these rows have no elements
      if (!is_live(i)) hidden_.factors[i] = NAN;
    }
    find_logits();
  }

  // Without thresholds of their own all rows have kTiny.
  void launch(bool has_thresholds) {
    const Guarded<uint8_t> hidden(hidden_.bytes), weight(weight_.bytes);
    const Guarded<float> row_factor(hidden_.factors), column_factor(weight_.factors), bias(transform_.bias),
        logit_offset(offset_);
    threshold_.clear();
    for (int64_t i = 0; i < shape_.rows; ++i) {
      threshold_.push_back(has_thresholds ? std::ldexp(1.f, -4 - static_cast<int>(i % 6)) : kTiny);
    }
    const Guarded<float> threshold(threshold_);
    const Guarded<int32_t> target(targets_), role(std::vector<int32_t>(kColumnOffset + shape_.columns, -1)),
        row_count(std::vector<int32_t>{static_cast<int32_t>(wishes_.rows)});
    const Guarded<uint64_t> seed(std::vector<uint64_t>{17});
    const Guarded<int32_t> count(std::vector<int32_t>(shape_.rows, 0));
    const Guarded<Draw> elements(shape_.rows * capacity());
    const Guarded<float> target_logit(std::vector<float>(shape_.rows, kUntouched));
    LogitsProduct product;
    product.dtype = DType::kE4M3;
    product.hidden = hidden.get(), product.hidden_stride = hidden_.stride;
    product.weight = weight.get(), product.weight_stride = weight_.stride;
    product.rows = shape_.rows, product.columns = shape_.columns, product.depth = shape_.depth;
    product.column_offset = kColumnOffset;
    product.transform.scale = transform_.scale;
    product.transform.softcap = transform_.softcap;
    if (wishes_.general) product.transform.bias = bias.get();
    if (wishes_.rows < shape_.rows) product.row_count = row_count.get();
    product.target = target.get();
    product.row_factor = row_factor.get(), product.column_factor = column_factor.get();
    DrawArgs args;
    args.target_logit = target_logit.get();
    args.logit_offset = logit_offset.get();
    args.draws.seed = seed.get();
    args.draws.role = role.get();
    args.draws.threshold = threshold.get();
    args.draws.count = count.get();
    args.draws.elements = elements.get();
    args.draws.capacity = static_cast<int32_t>(capacity());
    ASSERT_EQ(plan_logits({product, args}, processors(), true).instance.general, wishes_.general);
    const int partials = plan_logits({product, args}, processors(), true).partials;
    const Guarded<float> sum(std::vector<float>(partials * shape_.rows, 0.f)),
        expected(std::vector<float>(partials * shape_.rows, 0.f));
    args.stats.partials = partials;
    args.stats.stride = shape_.rows;
    args.stats.sum = sum.get();
    args.stats.expected = expected.get();
    launch_logits({product, args}, nullptr);
    check_cuda(cudaDeviceSynchronize());
    for (const auto* array : {&sum, &expected, &target_logit}) array->expect_guards();
    count.expect_guards();
    elements.expect_guards();
    sum_ = joined(sum.read(), shape_.rows);
    expected_ = joined(expected.read(), shape_.rows);
    target_logit_ = target_logit.read();
    const std::vector<int32_t> counts = count.read();
    const std::vector<Draw> lists = elements.read();
    kept_.assign(shape_.rows, {});
    for (int64_t i = 0; i < shape_.rows; ++i) {
      if (!is_live(i)) {
        ASSERT_EQ(counts[i], 0) << i;
        ASSERT_EQ(sum_[i], 0) << i;
        ASSERT_EQ(target_logit_[i], kUntouched) << i;
      }
      ASSERT_LT(counts[i], capacity()) << i;
      for (int32_t n = 0; n < counts[i]; ++n) {
        const Draw& draw = lists[i * capacity() + n];
        const int64_t column = draw.column_and_certain / 2 - kColumnOffset;
        ASSERT_GE(column, 0) << i;
        ASSERT_LT(column, shape_.columns) << i;
        ASSERT_TRUE(kept_[i].emplace(column, draw).second) << i << ", " << column;
      }
    }
  }

  // Every logit is listed and right. Sums are those of the listed logits.
  void check_all_logits() const {
    for (int64_t i = 0; i < shape_.rows; ++i) {
      if (!is_live(i)) continue;
      ASSERT_EQ(static_cast<int64_t>(kept_[i].size()), shape_.columns) << i;
      double sum = 0, error = 0;
      for (const auto& [j, draw] : kept_[i]) {
        ASSERT_EQ(draw.column_and_certain % 2, 1) << i << ", " << j;
        ASSERT_NEAR(draw.logit, z(i, j), error_[at(i, j)]) << i << ", " << j;
        const double q = std::exp(double{draw.logit} - offset_[i]);
        sum += q;
        error += q * 0x1p-22 * (2 + std::abs(draw.logit) + std::abs(offset_[i]));
      }
      ASSERT_NEAR(sum_[i], sum, error + 0x1p-17 * sum) << i;
      ASSERT_EQ(expected_[i], kTiny * static_cast<float>(shape_.columns)) << i;
      const int64_t y = targets_[i] - kColumnOffset;
      const bool is_here = y >= 0 && y < shape_.columns;
      ASSERT_EQ(target_logit_[i], is_here ? kept_[i].at(y).logit : kUntouched) << i;
    }
  }

  // Kept elements have the logits that are all listed, and large ones are kept.
  void check_kept(const Screen& all) const {
    ASSERT_EQ(sum_, all.sum_);
    ASSERT_EQ(target_logit_, all.target_logit_);
    for (int64_t i = 0; i < shape_.rows; ++i) {
      for (const auto& [j, draw] : kept_[i])
        ASSERT_EQ(draw.logit, all.kept_[i].at(j).logit) << i << ", " << j;
      for (const auto& [j, draw] : all.kept_[i]) {
        const double slack = 0x1p-21 * (2 + std::abs(draw.logit) + std::abs(offset_[i]));
        if (std::exp(draw.logit - offset_[i] - slack) < threshold_[i]) continue;
        const auto kept = kept_[i].find(j);
        ASSERT_NE(kept, kept_[i].end()) << i << ", " << j;
        ASSERT_EQ(kept->second.column_and_certain % 2, 1) << i << ", " << j;
      }
    }
  }

 private:
  int64_t capacity() const { return shape_.columns + 2; }
  int64_t at(int64_t i, int64_t j) const { return i * shape_.columns + j; }
  double z(int64_t i, int64_t j) const { return z_[at(i, j)]; }
  bool is_live(int64_t i) const { return i < wishes_.rows && targets_[i] != kIgnoredRow; }

  void find_logits() {
    const Guarded<float> e(hidden_.numbers), c(weight_.numbers);
    const size_t count = static_cast<size_t>(shape_.rows * shape_.columns);
    const Guarded<double> device_dot(count), device_bound(count);
    bounded_dot_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
        e.get(), c.get(), shape_.rows, shape_.columns, shape_.depth, device_dot.get(), device_bound.get());
    check_cuda(cudaDeviceSynchronize());
    const std::vector<double> dot = device_dot.read(), bound = device_bound.read();
    for (int64_t i = 0; i < shape_.rows; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < shape_.columns; ++j) {
        const double factor = double{transform_.scale} * hidden_.factors[i] * weight_.factors[j];
        const double bias = transform_.bias.empty() ? 0 : transform_.bias[j];
        const double x = factor * dot[at(i, j)] + bias, cap = transform_.softcap;
        z_.push_back(cap == 0 ? x : cap * std::tanh(x / cap));
        // The transform's roundings and its own bound; a plain kernel has no rounding if the scale is a
        // power.
        const double rounding = wishes_.general ? 1e-6 * cap + 0x1p-22 * (std::abs(x) + std::abs(bias)) : 0;
        error_.push_back(rounding + (wishes_.exact ? 0 : std::abs(factor) * bound[at(i, j)]));
        sum += std::exp(z_.back());
      }
      offset_.push_back(is_live(i) ? static_cast<float>(std::log(sum)) : 0);
    }
  }

  Shape shape_;
  Wishes wishes_;
  Operand hidden_, weight_;
  Transform transform_;
  std::vector<int32_t> targets_;
  std::vector<double> z_, error_;
  std::vector<float> offset_, threshold_, sum_, expected_, target_logit_;
  std::vector<std::map<int64_t, Draw>> kept_;
};

constexpr Shape kScreenShapes[] = {{1, 1, 16},        {1, 191, 64},     {127, 8, 72},
                                   {129, 193, 64},    {257, 192, 8},    {128, 500, 128},
                                   {300, 1000, 2048}, {300, 400, 2056}, {1000, 700, 136}};

class Screens : public OnHopper<Shape> {};

void run(Shape shape, const Wishes& wishes) {
  Screen all(shape, wishes), some(shape, wishes);
  all.launch(false);
  if (testing::Test::HasFatalFailure()) return;
  all.check_all_logits();
  if (testing::Test::HasFatalFailure()) return;
  some.launch(true);
  if (!testing::Test::HasFatalFailure()) some.check_kept(all);
}

TEST_P(Screens, ExactProducts) {
  run(GetParam(), {.exact = true});
}
TEST_P(Screens, ExactProductsOfGeneralKernels) {
  run(GetParam(), {.general = true, .exact = true});
}
TEST_P(Screens, Plain) {
  run(GetParam(), {});
}
TEST_P(Screens, General) {
  run(GetParam(), {.general = true});
}
TEST_P(Screens, FewerRows) {
  for (const int64_t rows : {int64_t{0}, GetParam().rows / 3, GetParam().rows - 1})
    run(GetParam(), {.exact = true, .rows = rows});
}

INSTANTIATE_TEST_SUITE_P(Shapes, Screens, testing::ValuesIn(kScreenShapes), name_of);

}  // namespace
}  // namespace logitless::cuda::sm90::test
