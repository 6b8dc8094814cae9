// The products whose bits do not depend on the number of rows: sizes and strides of all kinds, rows that do
// not exist, and an element on its own. Compiled for the CPU as well as for a GPU.
#include <cmath>
#include <optional>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "cuda/plan/sizes.h"
#include "cuda/rows/rows.h"
#include "cuda/runtime/gemm.h"
#include "cuda/runtime/queue.h"
#include "guarded.h"

namespace logitless::cuda::test {
namespace {

// A dtype, with the type of its elements in memory and of its sums.
template <DType kTypeOf, class StoredOf, class SumOf>
struct Format {
  static constexpr DType kType = kTypeOf;
  using Stored = StoredOf;
  using Sum = SumOf;

  static Stored stored(double value) {
    if constexpr (kType == DType::kBF16) return float_to_bf16(static_cast<float>(value));
    if constexpr (kType == DType::kF16) return float_to_f16(static_cast<float>(value));
    return static_cast<Stored>(value);
  }
  static double number(Stored value) {
    if constexpr (kType == DType::kBF16) return bf16_to_float(value);
    if constexpr (kType == DType::kF16) return f16_to_float(value);
    return static_cast<double>(value);
  }
};

struct Shape {
  int64_t m, n, k;
};

// Operands with NaN behind their rows, where nothing may read. extra: elements between rows.
template <class F>
struct Operands {
  using Stored = typename F::Stored;
  using Sum = typename F::Sum;

  Operands(const Shape& given, int64_t extra)
      : shape(given),
        stride(given.k + extra),
        a(make(given.m, 1)),
        b(make(given.n, 2)),
        device_a(a),
        device_b(b) {}

  std::vector<Stored> make(int64_t rows, unsigned seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, 1);
    std::vector<Stored> values(static_cast<size_t>(rows * stride), F::stored(NAN));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < shape.k; ++k) values[i * stride + k] = F::stored(normal(random));
    }
    return values;
  }

  Gemm product(const Guarded<Sum>& c, int64_t c_stride) const {
    Gemm g;
    g.m = shape.m, g.n = shape.n, g.k = shape.k;
    g.a = {device_a.get(), F::kType, stride};
    g.b = {device_b.get(), F::kType, stride};
    g.transpose_b = true;
    g.c = {c.get(), sizeof(Sum) == 8 ? DType::kF64 : DType::kF32, c_stride};
    return g;
  }

  // No order of the terms, with a rounding or truncation for each, has a larger error. Sums of float64 are
  // compared with ones of their own precision.
  void check(int64_t i, int64_t j, Sum got) const {
    double sum = 0, magnitude = 0;
    for (int64_t k = 0; k < shape.k; ++k) {
      const double term = F::number(a[i * stride + k]) * F::number(b[j * stride + k]);
      sum += term;
      magnitude += std::abs(term);
    }
    const double unit = sizeof(Sum) == 8 ? 0x1p-52 : 0x1p-23;
    ASSERT_NEAR(got, sum, static_cast<double>(shape.k + 1) * unit * magnitude) << i << ", " << j;
  }

  Shape shape;
  int64_t stride;
  std::vector<Stored> a, b;
  Guarded<Stored> device_a, device_b;
};

const Shape kShapes[] = {{1, 1, 1},      {1, 1, 8},       {1, 300, 8},     {300, 1, 24},   {65, 67, 33},
                         {128, 128, 32}, {130, 257, 100}, {200, 140, 515}, {129, 129, 64}, {5, 9, 31}};
constexpr double kUntouched = 12345;

template <class F>
class DotProducts : public testing::Test {
 protected:
  using Sum = typename F::Sum;

  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  }

  // C with columns behind the last one.
  static std::vector<Sum> multiplied(const Operands<F>& operands, const ExistingRows& rows) {
    const int64_t stride = operands.shape.n + 3;
    const Guarded<Sum> c(std::vector<Sum>(static_cast<size_t>(operands.shape.m * stride), kUntouched));
    launch_dot_products(operands.product(c, stride), rows, Queue(cudaStream_t{}));
    check_cuda(cudaDeviceSynchronize());
    c.expect_guards();
    return c.read();
  }

  static void check_rows(const Operands<F>& operands, const std::vector<Sum>& c,
                         const std::vector<bool>& exists) {
    const int64_t n = operands.shape.n, stride = n + 3;
    for (int64_t i = 0; i < operands.shape.m; ++i) {
      for (int64_t j = 0; j < stride; ++j) {
        const Sum got = c[i * stride + j];
        if (j < n && exists[i]) {
          operands.check(i, j, got);
        } else {
          ASSERT_EQ(got, static_cast<Sum>(kUntouched)) << i << ", " << j;
        }
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
};

using Formats = testing::Types<Format<DType::kBF16, uint16_t, float>, Format<DType::kF16, uint16_t, float>,
                               Format<DType::kF32, float, float>, Format<DType::kF64, double, double>>;
TYPED_TEST_SUITE(DotProducts, Formats);

TYPED_TEST(DotProducts, AnySizeAndStride) {
  for (const Shape& shape : kShapes) {
    // Rows side by side, at odd places, and at multiples of 16 bytes.
    for (int64_t extra : {int64_t{0}, int64_t{3}, (shape.k + 7) / 8 * 8 + 8 - shape.k}) {
      SCOPED_TRACE(testing::Message() << shape.m << " x " << shape.n << " x " << shape.k << " + " << extra);
      const Operands<TypeParam> operands(shape, extra);
      const std::vector<bool> all(static_cast<size_t>(shape.m), true);
      this->check_rows(operands, this->multiplied(operands, {}), all);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TYPED_TEST(DotProducts, RowsThatDoNotExistStayAsTheyAre) {
  const Shape shape{300, 70, 40};
  const Operands<TypeParam> operands(shape, 0);
  for (int64_t first : {0, 16, 128, 200}) {
    const int64_t blocks = row_blocks(first + shape.m);
    for (std::optional<int64_t> count :
         {std::optional<int64_t>{}, std::optional<int64_t>{0}, std::optional<int64_t>{first + 1},
          std::optional<int64_t>{first + 150}, std::optional<int64_t>{first + shape.m + 9}}) {
      for (int active : {-1, 0, 1, 2}) {  // each block, none, every other one
        SCOPED_TRACE(testing::Message()
                     << "from " << first << ", count " << count.value_or(-1) << ", " << active);
        std::vector<uint8_t> flags(static_cast<size_t>(blocks));
        for (int64_t b = 0; b < blocks; ++b) flags[b] = active > 0 && b % 2 == active - 1;
        const Guarded<uint8_t> block_active(flags);
        const Guarded<int32_t> row_count(std::vector<int32_t>{static_cast<int32_t>(count.value_or(0))});
        ExistingRows rows;
        rows.first = first;
        if (count) rows.count = row_count.get();
        if (active >= 0) rows.block_active = block_active.get();
        std::vector<bool> exists;
        for (int64_t i = first; i < first + shape.m; ++i) {
          exists.push_back(i < count.value_or(i + 1) && (active < 0 || flags[i / kRowBlock] != 0));
        }
        this->check_rows(operands, this->multiplied(operands, rows), exists);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// An element has the same bits on its own and anywhere among others, aligned or not.
TYPED_TEST(DotProducts, BitsDependOnRowAndColumnAlone) {
  using Sum = typename TypeParam::Sum;
  const Shape shape{190, 150, 203};
  const Operands<TypeParam> operands(shape, 0), apart(shape, 5);
  const std::vector<Sum> all = this->multiplied(operands, {});
  EXPECT_EQ(this->multiplied(apart, {}), all);
  const int64_t stride = shape.n + 3;
  for (const Shape& part : {Shape{1, 1, shape.k}, Shape{17, 33, shape.k}}) {
    for (int64_t row : {0, 9, 77, 131, 173}) {
      for (int64_t column : {0, 15, 66, 117}) {
        const Guarded<Sum> c(std::vector<Sum>(static_cast<size_t>(part.m * part.n)));
        Gemm g = operands.product(c, part.n);
        g.m = part.m, g.n = part.n;
        g.a = g.a.from(row);
        g.b = g.b.from(column);
        launch_dot_products(g, {}, Queue(cudaStream_t{}));
        check_cuda(cudaDeviceSynchronize());
        const std::vector<Sum> got = c.read();
        for (int64_t i = 0; i < part.m; ++i) {
          for (int64_t j = 0; j < part.n; ++j) {
            ASSERT_EQ(got[i * part.n + j], all[(row + i) * stride + column + j])
                << row + i << ", " << column + j;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace logitless::cuda::test
