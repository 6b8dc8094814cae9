// GEMM, packing and conversion kernels of every instruction set that this machine runs, against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu_kernel_fixture.h"

namespace logitless::cpu {
namespace {

using CpuGemm = CpuKernels;

TEST_P(CpuGemm, MultipliesEveryStripHeight) {
  const int64_t units = 37;
  const int64_t depth = units * k().pair;
  const int64_t panels = 3;
  const int64_t columns = panels * k().nr;
  const int64_t stride = units + 5;
  for (int rows = 1; rows <= k().mr; ++rows) {
    std::vector<float> a(static_cast<size_t>(rows * depth)), b(static_cast<size_t>(depth * columns));
    for (float& v : a) v = element();
    for (float& v : b) v = element();
    Aligned<uint32_t> by_rows(rows * stride), by_columns(units * (rows + 3)), packed(panels * units * k().nr);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t d = 0; d < depth; ++d) {
        const float v = a[static_cast<size_t>(i * depth + d)];
        set_element(by_rows.data(), i * stride * k().pair + d, v);
        set_element(by_columns.data(), (d / k().pair * (rows + 3) + i) * k().pair + d % k().pair, v);
      }
    }
    for (int64_t d = 0; d < depth; ++d) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t unit = (j / k().nr * units + d / k().pair) * k().nr + j % k().nr;
        set_element(packed.data(), unit * k().pair + d % k().pair, b[static_cast<size_t>(d * columns + j)]);
      }
    }
    for (const bool by_column : {false, true}) {
      for (const bool add : {false, true}) {
        const float old = 3;
        std::vector<float> c(static_cast<size_t>((rows + 1) * (columns + 7)), old);
        GemmStrip g;
        g.a = by_column ? by_columns.data() : by_rows.data();
        g.a_stride = by_column ? rows + 3 : stride;
        g.b = packed.data();
        g.b_panel_stride = units * k().nr;
        g.k = units;
        g.rows = rows;
        g.panels = panels;
        g.c = c.data();
        g.c_stride = columns + 7;
        g.add = add;
        by_column ? k().gemm_columns(g) : k().gemm_rows(g);
        for (int64_t i = 0; i <= rows; ++i) {
          for (int64_t j = 0; j < columns + 7; ++j) {
            const float got = c[static_cast<size_t>(i * (columns + 7) + j)];
            if (i == rows || j >= columns) {
              ASSERT_EQ(got, old) << "written outside at " << i << ", " << j;
              continue;
            }
            double sum = 0, size = 0;
            for (int64_t d = 0; d < depth; ++d) {
              const double product =
                  double{a[static_cast<size_t>(i * depth + d)]} * b[static_cast<size_t>(d * columns + j)];
              sum += product;
              size += std::abs(product);
            }
            ASSERT_NEAR(got, sum + (add ? old : 0), 0x1p-24 * static_cast<double>(depth + 1) * (size + old));
          }
        }
      }
    }
  }
}

TEST_P(CpuGemm, PacksTransposedAndInterleaved) {
  const int64_t rows = 2 * k().nr - 3;
  const int64_t depth = 2 * 130 + 1;  // odd, and past one chunk of units
  const int64_t stride = depth + 6;
  const int64_t panels = ceil_div(rows, k().nr);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (k().pair == 2 && dtype != DType::kBF16) continue;  // pairs only ever come from bf16
    std::vector<uint8_t> source(static_cast<size_t>(rows * stride) * size_of(dtype));
    for (int64_t i = 0; i < rows * stride; ++i) store_from_double(source.data(), dtype, i, random());
    const auto at = [&](int64_t i, int64_t d) {
      return i < rows && d < depth ? static_cast<float>(load_as_double(source.data(), dtype, i * stride + d))
                                   : 0;
    };
    const int64_t units = ceil_div(depth, k().pair);
    Aligned<uint32_t> out(panels * units * k().nr);
    k().pack_transposed({source.data(), dtype, stride}, rows, depth, panels, out.data());
    for (int64_t i = 0; i < panels * k().nr; ++i) {
      for (int64_t d = 0; d < units * k().pair; ++d) {
        const int64_t unit = (i / k().nr * units + d / k().pair) * k().nr + i % k().nr;
        ASSERT_EQ(get_element(out.data(), unit * k().pair + d % k().pair), at(i, d)) << i << ", " << d;
      }
    }
    const int64_t row_units = ceil_div(rows, k().pair) + 2;
    const int64_t wide = ceil_div(depth, k().nr) + 1;
    Aligned<uint32_t> interleaved(wide * row_units * k().nr);
    k().pack_interleaved({source.data(), dtype, stride}, rows, depth, row_units, wide, k().nr,
                         interleaved.data());
    for (int64_t i = 0; i < row_units * k().pair; ++i) {
      for (int64_t d = 0; d < wide * k().nr; ++d) {
        const int64_t unit = (d / k().nr * row_units + i / k().pair) * k().nr + d % k().nr;
        ASSERT_EQ(get_element(interleaved.data(), unit * k().pair + i % k().pair), at(i, d))
            << i << ", " << d;
      }
    }
  }
}

TEST_P(CpuGemm, ConvertsAndStoresRows) {
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
    std::vector<uint8_t> out(static_cast<size_t>(count) * size_of(dtype)), expected(out);
    k().store_row(values.data(), count, 1, false, dtype, out.data());
    for (int64_t j = 0; j < count; ++j) {
      const float v = values[static_cast<size_t>(j)];
      switch (dtype) {
        case DType::kBF16:
          reinterpret_cast<uint16_t*>(expected.data())[j] = float_to_bf16(v);
          break;
        case DType::kF16:
          reinterpret_cast<uint16_t*>(expected.data())[j] = float_to_f16(v);
          break;
        default:
          reinterpret_cast<float*>(expected.data())[j] = v;
      }
      const double got = load_as_double(out.data(), dtype, j);
      const double want = load_as_double(expected.data(), dtype, j);
      const bool flushed = std::abs(want) < 0x1p-126 && got == 0;  // the bf16 instruction has no subnormals
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)) || flushed)
          << dtype_name(dtype) << " " << v << ": " << got << " instead of " << want;
    }
    if (k().pair == 2 && dtype != DType::kBF16) continue;
    std::vector<uint32_t> elements(static_cast<size_t>(count + 9));
    k().convert_row({expected.data(), dtype, count}, count, count + 9, elements.data());
    for (int64_t j = 0; j < count + 9; ++j) {
      const float got = get_element(elements.data(), j);
      const float want = j < count ? static_cast<float>(load_as_double(expected.data(), dtype, j)) : 0;
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << j;
    }
  }
  std::vector<float> sum(static_cast<size_t>(count), 1.0f), ones(sum);
  k().store_row(ones.data(), count, 0.5f, true, DType::kF32, sum.data());
  for (const float v : sum) ASSERT_EQ(v, 1.5f);
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, CpuGemm, testing::ValuesIn(usable_kernels()),
                         [](const testing::TestParamInfo<Kernels>& parameter) {
                           return std::string(parameter.param.name);
                         });

TEST(CpuIsa, NamesAndRefusals) {
  EXPECT_EQ(why_isa_unavailable(""), "");
  EXPECT_NE(why_isa_unavailable("sse9").find("got sse9"), std::string::npos);
  EXPECT_EQ(why_isa_unavailable("portable"), "");
  Problem mixed;
  mixed.dtype.hidden = DType::kBF16;
  EXPECT_EQ(select_kernels(mixed, "").pair, 1);  // pairs need both matrices in bf16
}

}  // namespace
}  // namespace logitless::cpu
