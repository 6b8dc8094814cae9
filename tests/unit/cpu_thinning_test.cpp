// The kernels of thinned gradients of every instruction set that this machine runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/thinning.h"
#include "cpu/thinned/windows.h"
#include "cpu_kernel_fixture.h"

namespace logitless::cpu {
namespace {

using CpuThinning = CpuKernels;

// Every element is kept with min(1, q / threshold), and the number of small ones is one of two neighbors:
// over offsets at regular distances the counts of each are known to a step or two.
TEST_P(CpuThinning, DrawsEveryElementAsOftenAsItShould) {
  constexpr int64_t kColumns = 96;
  constexpr int kOffsets = 4096;
  const float threshold = 0.05f;
  Aligned<float> z(kColumns), q(kColumns), logits(kColumns + 16);
  Aligned<int32_t> columns(kColumns + 16);
  for (int64_t j = 0; j < kColumns; ++j) z[j] = j < 90 ? 2 * random() - 6 : -kInf;
  std::vector<int> kept(kColumns);
  double expected = 0;
  int64_t large = 0;
  const float guess = -1;
  for (int64_t j = 0; j < kColumns; ++j) {
    const double share = std::exp(double{z[j]} - guess) / threshold;
    share < 1 ? expected += share : large += 1;
  }
  for (int i = 0; i < kOffsets; ++i) {
    const float offset = (static_cast<float>(i) + 0.5f) / kOffsets;
    const int64_t count =
        k().draw_row({z.data(), kColumns, guess, threshold, offset, q.data(), columns.data(), logits.data()});
    EXPECT_GE(count - large, std::floor(expected - 1e-4));
    EXPECT_LE(count - large, std::ceil(expected + 1e-4));
    for (int64_t n = 0; n < count; ++n) {
      ASSERT_TRUE(n == 0 || columns[n] > columns[n - 1]);
      ASSERT_EQ(logits[n], z[columns[n]]);
      ++kept[static_cast<size_t>(columns[n])];
    }
  }
  for (int64_t j = 0; j < kColumns; ++j) {
    const double share = std::min(1.0, std::exp(double{z[j]} - guess) / threshold);
    EXPECT_NEAR(kept[static_cast<size_t>(j)], share * kOffsets, share < 1 ? 2 : 0) << j;
  }
}

TEST_P(CpuThinning, DrawsNothingFromNothing) {
  constexpr int64_t kColumns = 64;
  Aligned<float> z(kColumns), q(kColumns), logits(kColumns + 16);
  Aligned<int32_t> columns(kColumns + 16);
  for (float value : {-kInf, kNaN}) {
    std::fill_n(z.data(), kColumns, value);
    for (float guess : {-1e30f, 0.0f}) {
      EXPECT_EQ(
          k().draw_row({z.data(), kColumns, guess, 0.1f, 0.99f, q.data(), columns.data(), logits.data()}), 0);
    }
  }
  std::fill_n(z.data(), kColumns, 5.0f);
  EXPECT_EQ(k().draw_row({z.data(), kColumns, -1e30f, 1, 0.5f, q.data(), columns.data(), logits.data()}),
            kColumns);
}

TEST_P(CpuThinning, AddsRowsOfAnyDtype) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int64_t width : {1, 5, 16, 33, 100}) {
      for (int64_t count : {0, 1, 3, 4, 9, 21}) {
        const int64_t stride = width + 3;
        const int64_t rows = 12;
        Aligned<uint8_t> matrix(rows * stride * static_cast<int64_t>(size_of(dtype)));
        for (int64_t i = 0; i < rows * stride; ++i) store_from_double(matrix.data(), dtype, i, random());
        std::vector<SparseElement> list;
        for (int64_t n = 0; n < count; ++n) list.push_back({static_cast<int32_t>(n * 7 % rows), random()});
        Aligned<float> sums(width);
        std::vector<double> expected(static_cast<size_t>(width)), terms = expected;
        for (int64_t j = 0; j < width; ++j) {
          expected[static_cast<size_t>(j)] = sums[j] = random();
          for (const SparseElement& e : list) {
            const double term = e.value * load_as_double(matrix.data(), dtype, e.index * stride + j);
            expected[static_cast<size_t>(j)] += term;
            terms[static_cast<size_t>(j)] += std::fabs(term);
          }
        }
        k().add_rows({{matrix.data(), dtype, stride}, list.data(), count, width, sums.data()});
        for (int64_t j = 0; j < width; ++j) {
          EXPECT_NEAR(sums[j], expected[static_cast<size_t>(j)],
                      0x1p-23 * static_cast<double>(count + 1) * (terms[static_cast<size_t>(j)] + 4));
        }
        const double dot =
            k().dot_rows({matrix.data(), dtype, stride}, {sums.data(), DType::kF32, stride}, width);
        double exact = 0;
        for (int64_t j = 0; j < width; ++j)
          exact += load_as_double(matrix.data(), dtype, j) * double{sums[j]};
        EXPECT_NEAR(dot, exact, 0x1p-20 * static_cast<double>(width) * 20);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, CpuThinning, testing::ValuesIn(usable_kernels()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

// Windows follow each other without a gap, and every block knows its own.
TEST(DrawWindows, CoverAllBlocks) {
  for (int64_t blocks : {1, 2, 3, 63, 64, 65, 200, 1143}) {
    const int64_t windows = draw_windows(blocks);
    EXPECT_EQ(draw_window_start(0), 0);
    EXPECT_LT(draw_window_start(windows - 1), blocks);
    EXPECT_GE(draw_window_start(windows), blocks);
    for (int64_t window = 0; window < windows; ++window) {
      const int64_t start = draw_window_start(window);
      const int64_t end = draw_window_start(window + 1);
      ASSERT_GT(end, start);
      EXPECT_LE(end - start, std::max<int64_t>(1, std::min(start, kLargestDrawWindow)));
      for (int64_t block = start; block < end; ++block) EXPECT_EQ(draw_window_of(block), window);
    }
  }
}

}  // namespace
}  // namespace logitless::cpu
