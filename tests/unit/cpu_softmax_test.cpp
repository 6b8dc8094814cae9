// exp, softmax and gradient kernels of every instruction set that this machine runs, against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_kernel_fixture.h"

namespace logitless::cpu {
namespace {

using CpuSoftmax = CpuKernels;

TEST_P(CpuSoftmax, ExpIsAccurateEverywhere) {
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

struct StripCase {
  int64_t columns;
  float scale, softcap;
  bool bias, weight;
};

// Logits of a strip in double, from the same dot products.
std::vector<double> exact_logits(const StripCase& c, const std::vector<float>& dots, int rows,
                                 const std::vector<float>& bias) {
  std::vector<double> z;
  for (int i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < c.columns; ++j) {
      double v = double{c.scale} * dots[static_cast<size_t>(i * c.columns + j)];
      if (c.bias) v += bias[static_cast<size_t>(j)];
      if (c.softcap != 0) v = c.softcap * std::tanh(v / c.softcap);
      z.push_back(v);
    }
  }
  return z;
}

TEST_P(CpuSoftmax, SoftmaxAndGradientsOfAStrip) {
  for (const StripCase& c : {StripCase{96, 1, 0, false, false}, StripCase{77, 1, 0, false, true},
                             StripCase{1, 0.5f, 0, true, false}, StripCase{95, 1.5f, 5, true, true},
                             StripCase{64, 1, 30, false, false}}) {
    const int rows = k().mr > 2 ? k().mr - 1 : 2;
    const int64_t padded = round_up(c.columns, 32);
    std::vector<float> dots(static_cast<size_t>(rows * c.columns));
    for (float& v : dots) v = 4 * random();
    std::vector<float> bias(static_cast<size_t>(padded)), weight(static_cast<size_t>(padded));
    for (int64_t j = 0; j < c.columns; ++j) {
      bias[static_cast<size_t>(j)] = random();
      weight[static_cast<size_t>(j)] = std::abs(random());
    }
    const std::vector<double> z = exact_logits(c, dots, rows, bias);
    std::vector<int32_t> target(static_cast<size_t>(rows));
    for (int i = 0; i < rows; ++i) {
      target[static_cast<size_t>(i)] = i % 3 == 0 ? -1 : static_cast<int32_t>((i * 31) % c.columns);
    }
    Aligned<float> strip_z(rows * padded);
    const auto reset = [&] {
      for (int64_t i = 0; i < rows * padded; ++i) strip_z[i] = kNaN;
      for (int i = 0; i < rows; ++i) {
        std::copy_n(dots.data() + i * c.columns, c.columns, strip_z.data() + i * padded);
      }
    };
    LogitStrip strip{
        strip_z.data(), padded, rows, c.columns, padded, target.data(), c.weight ? weight.data() : nullptr};
    const LogitTransform<float> t{c.scale, c.softcap, c.bias ? bias.data() : nullptr};
    std::vector<float> max(16), sum(16), zy(16, -5), offset(16), weighted(16), logit_sum(16), sum_sq(16);
    std::vector<int32_t> argmax(16);
    Aligned<uint32_t> exps(rows * padded), dz(rows * padded);
    reset();
    k().softmax_strip(strip, t,
                      {.max = max.data(),
                       .sum_exp = sum.data(),
                       .target_logit = zy.data(),
                       .sum_offset = offset.data(),
                       .weighted = weighted.data(),
                       .logit_sum = logit_sum.data(),
                       .sum_sq = sum_sq.data(),
                       .argmax = argmax.data()},
                      exps.data(), padded);
    std::vector<float> lse(16), lse_low(16), a(16), b(16), cc(16), g(16), factor(16), exact_target(16);
    const double logit_error = 0x1p-21 * 20;  // a few roundings of logits up to 20
    for (int i = 0; i < rows; ++i) {
      const auto r = static_cast<size_t>(i);
      const double* row = z.data() + i * c.columns;
      const int64_t best = std::max_element(row, row + c.columns) - row;
      double s = 0, so = 0, sw = 0, sl = 0, ss = 0;
      for (int64_t j = 0; j < c.columns; ++j) {
        const double e = std::exp(row[j] - row[best]);
        s += e;
        so += e * (row[j] - row[best]);
        sl += row[j];
        ss += e * e;
        sw += (c.weight ? weight[static_cast<size_t>(j)] : 1.0) * (row[j] - row[best]);
        const double slope = c.softcap != 0 ? 1 - (row[j] / c.softcap) * (row[j] / c.softcap) : 1;
        ASSERT_NEAR(get_element(exps.data(), i * padded + j), e * slope, element_epsilon() + 2 * logit_error);
      }
      for (int64_t j = c.columns; j < padded; ++j) ASSERT_EQ(get_element(exps.data(), i * padded + j), 0);
      ASSERT_NEAR(max[r], row[best], logit_error);
      ASSERT_NEAR(sum[r], s, 2 * logit_error * s);
      ASSERT_NEAR(offset[r], so, 2 * logit_error * (s + std::abs(so)));
      ASSERT_NEAR(weighted[r], sw, 100 * logit_error);
      ASSERT_NEAR(logit_sum[r], sl, 100 * logit_error);
      ASSERT_NEAR(sum_sq[r], ss, 4 * logit_error * ss);
      ASSERT_EQ(argmax[r], best);
      if (target[r] >= 0) {
        ASSERT_NEAR(zy[r], row[target[r]], logit_error);
      } else {
        ASSERT_EQ(zy[r], -5);
      }
      lse[r] = static_cast<float>(row[best] + std::log(s));
      lse_low[r] = 0x1p-9f * random();
      a[r] = random();
      b[r] = i % 2 == 0 ? random() : 0;
      cc[r] = i % 4 == 0 ? random() : 0;
      g[r] = random();
      factor[r] = random();
      exact_target[r] = element();
    }
    reset();
    k().gradient_strip(strip, t, {lse.data(), lse_low.data(), a.data(), b.data(), cc.data(), g.data()},
                       dz.data(), padded);
    for (int i = 0; i < rows; ++i) {
      const auto r = static_cast<size_t>(i);
      for (int64_t j = 0; j < padded; ++j) {
        const float got = get_element(dz.data(), i * padded + j);
        if (j >= c.columns) {
          ASSERT_EQ(got, 0);
          continue;
        }
        const double zj = z[static_cast<size_t>(i * c.columns + j)];
        const double w = c.weight ? weight[static_cast<size_t>(j)] : 1.0;
        const double log_p = zj - lse[r] - lse_low[r];
        double v = std::exp(log_p) * (a[r] + b[r] * log_p) + cc[r] * w - (target[r] == j ? g[r] : 0);
        if (c.softcap != 0) v *= 1 - (zj / c.softcap) * (zj / c.softcap);
        ASSERT_NEAR(got, v, element_epsilon() * std::abs(v) + 40 * logit_error) << i << ", " << j;
      }
    }
    // Finishing kept exps: in place, the target exact, the padding zero.
    std::vector<float> before;
    for (int64_t i = 0; i < rows * padded; ++i) before.push_back(get_element(exps.data(), i));
    Aligned<uint32_t> elsewhere(rows * padded);
    for (const auto& [with_c, in_place] :
         {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
      for (int64_t i = 0; i < rows * padded; ++i) set_element(exps.data(), i, before[static_cast<size_t>(i)]);
      for (int64_t i = 0; i < rows * padded; ++i) set_element(elsewhere.data(), i, 77);
      uint32_t* const written = in_place ? exps.data() : elsewhere.data();
      k().finish_strip({exps.data(), written, padded, rows, c.columns, padded, factor.data(),
                        with_c ? cc.data() : nullptr, c.weight ? weight.data() : nullptr, target.data(),
                        exact_target.data()});
      for (int i = 0; i < rows; ++i) {
        const auto r = static_cast<size_t>(i);
        for (int64_t j = 0; j < padded; ++j) {
          const double w = c.weight ? weight[static_cast<size_t>(j)] : 1.0;
          double v =
              double{before[static_cast<size_t>(i * padded + j)]} * factor[r] + (with_c ? cc[r] * w : 0);
          if (target[r] == j) v = exact_target[r];
          if (j >= c.columns) v = 0;
          ASSERT_NEAR(get_element(written, i * padded + j), v,
                      element_epsilon() * std::abs(v) + 0x1p-22 * std::abs(v) + 0x1p-22);
        }
      }
    }
    std::vector<float> sums(static_cast<size_t>(padded), 1.0f);
    k().add_column_sums(exps.data(), padded, rows, padded, sums.data());
    for (int64_t j = 0; j < padded; ++j) {
      double s = 1;
      for (int i = 0; i < rows; ++i) s += get_element(exps.data(), i * padded + j);
      ASSERT_NEAR(sums[static_cast<size_t>(j)], s, 1e-4);
    }
  }
}

TEST_P(CpuSoftmax, InfinitiesAndNaN) {
  const int64_t columns = 40, padded = 64;
  Aligned<float> z(2 * padded);
  std::vector<float> max(2), sum(2), zy(2);
  Aligned<uint32_t> exps(2 * padded);
  std::vector<int32_t> target{0, -1}, argmax(2);
  const auto run = [&](float odd, float rest) {
    for (int64_t i = 0; i < 2 * padded; ++i) z[i] = rest;
    z[39] = odd;
    z[padded + 3] = odd;
    LogitStrip strip{z.data(), padded, 2, columns, padded, target.data(), nullptr};
    BlockStats stats;
    stats.max = max.data();
    stats.sum_exp = sum.data();
    stats.target_logit = zy.data();
    stats.argmax = argmax.data();
    k().softmax_strip(strip, {}, stats, exps.data(), padded);
  };
  run(1.0f, -kInf);  // all masked but one
  EXPECT_EQ(sum[0], 1);
  EXPECT_EQ(max[1], 1);
  run(-kInf, -kInf);  // all masked: nothing, and no NaN
  EXPECT_EQ(sum[0], 0);
  EXPECT_EQ(max[0], -kInf);
  EXPECT_EQ(get_element(exps.data(), 5), 0);
  run(kNaN, 1.0f);
  EXPECT_TRUE(std::isnan(sum[0]) && std::isnan(sum[1]));
  EXPECT_TRUE(std::isnan(max[0]) && std::isnan(max[1]));
  EXPECT_EQ(argmax, (std::vector<int32_t>{39, 3}));
  run(kInf, 1.0f);
  EXPECT_TRUE(std::isnan(sum[0]) && std::isnan(sum[1]));
  EXPECT_EQ(argmax, (std::vector<int32_t>{39, 3}));
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, CpuSoftmax, testing::ValuesIn(usable_kernels()),
                         [](const testing::TestParamInfo<Kernels>& parameter) {
                           return std::string(parameter.param.name);
                         });

}  // namespace
}  // namespace logitless::cpu
