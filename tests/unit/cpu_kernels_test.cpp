// Properties of an instruction set's kernels that the agreement of whole runs (tests/property) does not show:
// exp, conversions at the ends of the formats, how often a draw keeps an element.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "cpu/simd/kernels.h"
#include "cpu/sparsified/arena.h"

namespace logitless::cpu {

void PrintTo(const Kernels& kernels, std::ostream* out) {
  *out << kernels.name;
}

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<Kernels> usable_kernels() {
  std::vector<Kernels> out;
  const Kernels* pairs = bf16_pair_kernels();
  if (pairs != nullptr && why_engine_unavailable(pairs->name).empty()) out.push_back(*pairs);
  for (const Kernels& k : fp32_kernels()) {
    if (why_engine_unavailable(k.name).empty()) out.push_back(k);
  }
  return out;
}

class CpuKernels : public testing::TestWithParam<Kernels> {
 protected:
  const Kernels& k() const { return GetParam(); }
  float random() { return std::normal_distribution<float>()(engine_); }
  float get_element(const void* elements, int64_t i) const {
    return k().pair == 2 ? bf16_to_float(static_cast<const uint16_t*>(elements)[i])
                         : static_cast<const float*>(elements)[i];
  }

 private:
  std::mt19937 engine_{7};
};

TEST_P(CpuKernels, ExpIsAccurateEverywhere) {
  std::vector<float> x, y;
  for (double v = -110; v < 90; v += 0.00137) x.push_back(static_cast<float>(v));
  y.resize(x.size());
  k().exp_row(x.data(), static_cast<int64_t>(x.size()), y.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(double{x[i]});
    if (exact > 0x1.fffffep127) {
      ASSERT_EQ(y[i], kInf);
    } else {
      ASSERT_NEAR(y[i], exact, std::max(0x1p-23 * exact, 0x1p-148)) << x[i];
    }
  }
  std::vector<float> special{-kInf, kInf, kNaN, 0, -1e30f, 1e30f, -0.0f};
  k().exp_row(special.data(), 7, special.data());
  EXPECT_EQ(special[0], 0);
  EXPECT_EQ(special[1], kInf);
  EXPECT_TRUE(std::isnan(special[2]));
  EXPECT_EQ(special[3], 1);
  EXPECT_EQ(special[4], 0);
  EXPECT_EQ(special[5], kInf);
  EXPECT_EQ(special[6], 1);
}

TEST_P(CpuKernels, ConvertsAndStoresRows) {
  const int64_t count = 71;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = random();
    values[3] = kNaN;
    values[4] = kInf;
    values[5] = -kInf;
    values[6] = 1e-40f;
    values[7] = 65519.99f;
    values[8] = 3.4e38f;
    std::vector<uint8_t> out(static_cast<size_t>(count) * size_of(dtype));
    k().store_row(values.data(), count, 1, false, dtype, out.data());
    for (int64_t j = 0; j < count; ++j) {
      const float v = values[static_cast<size_t>(j)];
      const double want = dtype == DType::kBF16  ? bf16_to_float(float_to_bf16(v))
                          : dtype == DType::kF16 ? f16_to_float(float_to_f16(v))
                                                 : v;
      const double got = load_as_double(out.data(), dtype, j);
      const bool flushed = std::abs(want) < 0x1p-126 && got == 0;  // the bf16 instruction has no subnormals
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)) || flushed)
          << dtype_name(dtype) << " " << v << ": " << got << " instead of " << want;
    }
    if (k().pair == 2 && dtype != DType::kBF16) continue;
    std::vector<uint32_t> elements(static_cast<size_t>(count + 9));
    k().convert_row({out.data(), dtype, count}, count, count + 9, elements.data());
    for (int64_t j = 0; j < count + 9; ++j) {
      const float got = get_element(elements.data(), j);
      const float want = j < count ? static_cast<float>(load_as_double(out.data(), dtype, j)) : 0;
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << j;
    }
  }
  std::vector<float> sum(static_cast<size_t>(count), 1.0f), ones(sum);
  k().store_row(ones.data(), count, 0.5f, true, DType::kF32, sum.data());
  for (const float v : sum) ASSERT_EQ(v, 1.5f);
}

// Every element is kept with min(1, q / threshold), and the number of small ones is one of two neighbors.
// Over offsets at regular distances the counts of each are known to a step or two.
TEST_P(CpuKernels, DrawsEveryElementAsOftenAsItShould) {
  constexpr int64_t kColumns = 96;
  constexpr int kOffsets = 4096;
  const float threshold = 0.05f;
  alignas(64) float z[kColumns], q[kColumns], logits[kColumns + 16];
  alignas(64) int32_t columns[kColumns + 16];
  for (int64_t j = 0; j < kColumns; ++j) z[j] = j < 90 ? 2 * random() - 6 : -kInf;
  std::vector<int> kept(kColumns);
  double expected = 0;
  int64_t large = 0;
  const float lse_estimate = -1;
  for (int64_t j = 0; j < kColumns; ++j) {
    const double share = std::exp(double{z[j]} - lse_estimate) / threshold;
    share < 1 ? expected += share : large += 1;
  }
  for (int i = 0; i < kOffsets; ++i) {
    const float offset = (static_cast<float>(i) + 0.5f) / kOffsets;
    const int64_t count = k().draw_row({z, kColumns, lse_estimate, threshold, offset, q, columns, logits});
    EXPECT_GE(count - large, std::floor(expected - 1e-4));
    EXPECT_LE(count - large, std::ceil(expected + 1e-4));
    for (int64_t n = 0; n < count; ++n) {
      ASSERT_TRUE(n == 0 || columns[n] > columns[n - 1]);
      ASSERT_EQ(logits[n], z[columns[n]]);
      ++kept[static_cast<size_t>(columns[n])];
    }
  }
  for (int64_t j = 0; j < kColumns; ++j) {
    const double share = std::min(1.0, std::exp(double{z[j]} - lse_estimate) / threshold);
    EXPECT_NEAR(kept[static_cast<size_t>(j)], share * kOffsets, share < 1 ? 2 : 0) << j;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryEngine, CpuKernels, testing::ValuesIn(usable_kernels()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(CpuEngines, NamesAndRefusals) {
  EXPECT_EQ(why_engine_unavailable(""), "");
  EXPECT_NE(why_engine_unavailable("sse9").find("got sse9"), std::string::npos);
  EXPECT_EQ(why_engine_unavailable("portable"), "");
  Problem mixed;
  mixed.dtype.hidden = DType::kBF16;
  EXPECT_EQ(select_kernels(mixed, "").pair, 1);  // pairs need both matrices in bf16
}

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
