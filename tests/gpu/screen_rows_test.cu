// Rows as a screen sees them, element by element against core/fp8.h: dtypes, sizes, strides and addresses of
// all kinds, numbers at both ends of the range, and rows that do not exist. Compiled for the CPU as well as
// for a GPU.
#include <cmath>
#include <optional>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "core/fp8.h"
#include "cuda/rows/rows.h"
#include "cuda/runtime/queue.h"
#include "guarded.h"

namespace logitless::cuda::test {
namespace {

constexpr int64_t kRows = 19;

// Rows of each kind of numbers that rounding treats in a way of its own.
double number_of(int64_t row, int64_t column, int64_t columns, DType dtype, std::mt19937* random) {
  const double normal = std::normal_distribution<double>()(*random);
  const bool is_half = dtype == DType::kF16;
  const bool is_one = column == columns / 2;  // one element of the row
  switch (row % 9) {
    case 0:
      return 0;
    case 1:
      return is_one ? NAN : normal;
    case 2:
      return is_one ? -INFINITY : normal;
    case 3:  // subnormal numbers
      return std::ldexp(normal, is_half ? -18 : -130);
    case 4:
      return std::ldexp(std::fmod(normal, 1), is_half ? 15 : 127);
    case 5:  // many halfway between two neighbours
      return static_cast<double>(static_cast<int>((*random)() % 513) - 256);
    case 6:  // the largest number of its scale, and one that needs the next
      return is_one ? (row < 9 ? 448 : -450) : normal;
    case 7:  // steps of 2^-9 and what is below them
      return is_one ? 256 : std::ldexp(normal, -9);
    default:
      return normal;
  }
}

double e4m3_number(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits >= 128 ? -magnitude : magnitude;
}

struct Layout {
  int64_t columns, extra, offset;  // elements between rows, and before the first one
};

struct Skips {
  bool map = false;
  std::optional<int32_t> count;
  bool ignored = false;
};

class Rows {
 public:
  Rows(DType dtype, const Layout& layout)
      : dtype_(dtype), layout_(layout), stride_(layout.columns + layout.extra) {
    const int64_t bytes = static_cast<int64_t>(size_of(dtype));
    bytes_.assign(static_cast<size_t>((layout.offset + kRows * stride_) * bytes), 0xff);  // NaN
    std::mt19937 random(17);
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t k = 0; k < layout.columns; ++k) {
        store_from_double(bytes_.data(), dtype, at(i, k), number_of(i, k, layout.columns, dtype, &random));
      }
    }
  }

  float number(int64_t i, int64_t k) const {
    return static_cast<float>(load_as_double(bytes_.data(), dtype_, at(i, k)));
  }
  int exponent(int64_t i) const {
    float largest = 0;
    for (int64_t k = 0; k < layout_.columns; ++k) largest = std::fmax(largest, std::fabs(number(i, k)));
    return fp8_row_exponent(largest);
  }

  // T: of the copy's elements, as they lie in memory.
  template <class T>
  void check(const Skips& skips) const {
    constexpr bool kFp8 = sizeof(T) == 1;
    constexpr T kUntouched = static_cast<T>(0xA5A5);
    const int64_t padded = (layout_.columns + 15) / 16 * 16, to_stride = padded + 16;
    const Guarded<uint8_t> from(bytes_);
    const Guarded<T> to(static_cast<size_t>(kRows * to_stride));
    const Guarded<float> factor(kRows);
    std::vector<int32_t> map, targets;
    for (int64_t i = 0; i < kRows; ++i) {
      map.push_back(static_cast<int32_t>(skips.map ? (i * 7 + 3) % kRows : i));
      targets.push_back(skips.ignored && i % 4 == 1 ? kIgnoredRow : 5);
    }
    const Guarded<int32_t> row_map(map), target(targets),
        count(std::vector<int32_t>{skips.count.value_or(0)});
    RowsCopy c{};
    c.from = ConstMatrix{from.get(), dtype_, stride_}.from(0, layout_.offset);
    c.to = {to.get(), kFp8 ? DType::kE4M3 : DType::kBF16, to_stride};
    if (skips.map) c.row_map = row_map.get();
    if (skips.count) c.row_count = count.get();
    if (skips.ignored) c.target = target.get();
    c.rows = kRows, c.columns = layout_.columns, c.padded = padded;
    launch_screen_rows(c, kFp8 ? factor.get() : nullptr, Queue(cudaStream_t{}));
    check_cuda(cudaDeviceSynchronize());
    to.expect_guards();
    factor.expect_guards();
    const std::vector<T> copied = to.read();
    const std::vector<float> factors = factor.read();
    for (int64_t i = 0; i < kRows; ++i) {
      const bool exists = i < skips.count.value_or(kRows) && targets[i] != kIgnoredRow;
      const int power = exists ? exponent(map[i]) : 0;
      if (kFp8) ASSERT_EQ(factors[i], std::ldexp(1.f, power)) << "row " << i;
      for (int64_t k = 0; k < to_stride; ++k) {
        const T got = copied[i * to_stride + k];
        if (k >= padded) {
          ASSERT_EQ(got, kUntouched) << i << ", " << k;
        } else if (k >= layout_.columns || !exists) {
          ASSERT_EQ(got, 0) << i << ", " << k;
        } else {
          const float value = number(map[i], k);
          const float expected = kFp8 ? round_to_fp8(std::ldexp(value, -power)) : screened(value, power);
          const double number = kFp8 ? e4m3_number(static_cast<uint8_t>(got)) : bf16_to_float(got);
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(number)) << i << ", " << k;
          } else {
            ASSERT_EQ(number, expected) << i << ", " << k << " of " << value;
          }
        }
      }
    }
  }

 private:
  int64_t at(int64_t i, int64_t k) const { return layout_.offset + i * stride_ + k; }

  DType dtype_;
  Layout layout_;
  int64_t stride_;
  std::vector<uint8_t> bytes_;
};

class Screened : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  }
  void check(const Layout& layout, const Skips& skips = {}) const {
    SCOPED_TRACE(testing::Message() << layout.columns << " + " << layout.extra << " from " << layout.offset);
    const Rows rows(GetParam(), layout);
    rows.check<uint8_t>(skips);
    rows.check<uint16_t>(skips);
  }
};

TEST_P(Screened, SizesAndStrides) {
  // One warp takes rows up to 1024 elements, and a block's threads keep 8192.
  for (const int64_t columns :
       {1, 7, 8, 64, 72, 515, 1000, 1024, 1032, 2050, 4096, 8192, 8200, 9001, 20000}) {
    const int64_t to_pieces = (columns + 7) / 8 * 8 - columns;
    for (const Layout& layout :
         {Layout{columns, 0, 0}, Layout{columns, 3, 1}, Layout{columns, to_pieces + 8, 0},
          Layout{columns, to_pieces, 3}, Layout{columns, to_pieces + 8, 8}}) {
      check(layout);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST_P(Screened, RowsThatDoNotExistBecomeZero) {
  for (const Layout& layout : {Layout{72, 8, 0}, Layout{515, 0, 1}, Layout{9000, 0, 0}}) {
    for (const Skips& skips : {Skips{.map = true}, Skips{.count = 0}, Skips{.count = 7},
                               Skips{.ignored = true}, Skips{.map = true, .count = 18, .ignored = true}}) {
      check(layout, skips);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, Screened, testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(ScreenedRows, NothingIsWrittenWhereTheConditionFails) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  const Guarded<float> from(std::vector<float>(64, 1.f)), factor(4);
  const Guarded<uint8_t> to(64), flags(std::vector<uint8_t>(300, 0));
  RowsCopy c{};
  c.from = {from.get(), DType::kF32, 16};
  c.to = {to.get(), DType::kE4M3, 16};
  c.rows = 4, c.columns = c.padded = 16;
  c.condition = {flags.get(), 300};
  launch_screen_rows(c, factor.get(), Queue(cudaStream_t{}));
  check_cuda(cudaDeviceSynchronize());
  ASSERT_EQ(to.read(), std::vector<uint8_t>(64, Guarded<uint8_t>::kPattern));
}

}  // namespace
}  // namespace logitless::cuda::test
