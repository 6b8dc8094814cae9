// Index arithmetic past 32 bits: more than 2^31 logits, a weight of more than 2^31 elements, rows further
// apart than that. The truth is computed in double, for a few rows only, from the same memory.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "device.h"

namespace logitless_test {
namespace {

// Numbers in [-1, 1) with few bits, from the index alone.
__global__ void fill_kernel(__nv_bfloat16* data, int64_t count, uint32_t seed, float scale) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t x = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u + seed;
    x ^= x >> 31;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
    data[i] = __float2bfloat16_rn((static_cast<float>(x % 128) / 64 - 1) * scale);
  }
}

// z[i][j] = a[a_rows[i]] . b[j]
__global__ void dots_kernel(const __nv_bfloat16* a, const int64_t* a_rows, int64_t m, const __nv_bfloat16* b,
                            int64_t n, int64_t depth, double* z) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= m * n) return;
  const int64_t i = at / n, j = at % n;
  const __nv_bfloat16* x = a + a_rows[i] * depth;
  const __nv_bfloat16* y = b + j * depth;
  double sum = 0;
  for (int64_t k = 0; k < depth; ++k) sum += double{__bfloat162float(x[k])} * __bfloat162float(y[k]);
  z[at] = sum;
}

// out[r][k] = sum_j weights[r][j] rows[j][k], and the sum of magnitudes likewise.
__global__ void sums_kernel(const double* weights, int64_t count, const __nv_bfloat16* rows, int64_t depth,
                            double* out, double* magnitudes) {
  const int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, r = blockIdx.y;
  if (k >= depth) return;
  double sum = 0, magnitude = 0;
  for (int64_t j = 0; j < count; ++j) {
    const double term = weights[r * count + j] * __bfloat162float(rows[j * depth + k]);
    sum += term;
    magnitude += fabs(term);
  }
  out[r * depth + k] = sum;
  magnitudes[r * depth + k] = magnitude;
}

unsigned blocks(int64_t count) {
  return static_cast<unsigned>((count + 255) / 256);
}

template <class T>
DeviceMemory uploaded(const std::vector<T>& values) {
  DeviceMemory memory(values.size() * sizeof(T));
  cuda_check(cudaMemcpy(memory.as(), values.data(), memory.size(), cudaMemcpyHostToDevice));
  return memory;
}

class Large : public EngineTest {
 protected:
  void skip_unless_free(int64_t bytes) {
    size_t free = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free, &total));
    if (static_cast<int64_t>(free) < bytes)
      GTEST_SKIP() << "needs " << (bytes >> 30) << " GiB of free device memory";
  }

  // Rows [count, depth] as floats.
  static std::vector<float> rows_of(const DeviceMemory& matrix, const std::vector<int64_t>& rows,
                                    int64_t depth) {
    std::vector<float> out;
    std::vector<uint16_t> row(static_cast<size_t>(depth));
    for (int64_t i : rows) {
      cuda_check(
          cudaMemcpy(row.data(), matrix.as<uint16_t>() + i * depth, row.size() * 2, cudaMemcpyDeviceToHost));
      for (size_t k = 0; k < row.size(); ++k) {
        out.push_back(static_cast<float>(load(row.data(), LOGITLESS_BF16, static_cast<int64_t>(k))));
      }
    }
    return out;
  }

  // Expects |got - sum| to be at most the roundings of each term to bfloat16, of the result, and the part
  // that fp32 sums of `terms` terms cut off.
  static void expect_close(const char* what, const std::vector<float>& got, const DeviceMemory& sums,
                           const DeviceMemory& magnitudes, double roundings, int64_t terms) {
    const std::vector<double> truth = sums.read<double>(), sizes = magnitudes.read<double>();
    const double unit = 0x1p-8 * roundings + 0x1p-23 * static_cast<double>(terms / 16 + 64);
    ASSERT_EQ(got.size(), truth.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(is_close(got[i], truth[i], unit * sizes[i] + 0x1p-100, LOGITLESS_BF16))
          << what << "[" << i << "] = " << got[i] << " instead of " << truth[i];
    }
  }

  void check(const PlainSize& s, size_t budget) {
    SCOPED_TRACE(testing::Message() << "budget " << budget);
    const auto elements = [](int64_t rows, int64_t columns) {
      return static_cast<size_t>(rows * columns) * 2;
    };
    const DeviceMemory hidden(elements(s.tokens, s.hidden)), weight(elements(s.vocab, s.hidden));
    const DeviceMemory d_hidden(hidden.size()), d_weight(weight.size());
    const DeviceMemory nll(static_cast<size_t>(s.tokens) * 4), lse(nll.size()), loss(4);
    fill_kernel<<<4096, 256>>>(hidden.as<__nv_bfloat16>(), s.tokens * s.hidden, 1, 1);
    // Gives logits a standard deviation of about 2.
    const float scale = std::exp2(std::round(std::log2(6 / std::sqrt(static_cast<float>(s.hidden)))));
    fill_kernel<<<4096, 256>>>(weight.as<__nv_bfloat16>(), s.vocab * s.hidden, 2, scale);
    std::vector<int64_t> targets(static_cast<size_t>(s.tokens));
    for (size_t i = 0; i < targets.size(); ++i) {
      targets[i] = i % 2 == 0 ? s.vocab - 1 - static_cast<int64_t>(i / 2) % 3
                              : static_cast<int64_t>(i * 7919) % s.vocab;
    }
    const DeviceMemory y = uploaded(targets);

    logitless::Problem problem;
    problem.pass = LOGITLESS_FORWARD_BACKWARD;
    problem.reduction = LOGITLESS_REDUCTION_SUM;
    problem.tokens = s.tokens;
    problem.vocab = s.vocab;
    problem.hidden = s.hidden;
    problem.dtype.hidden = problem.dtype.weight = problem.dtype.d_hidden = problem.dtype.d_weight =
        LOGITLESS_BF16;
    problem.has.d_hidden = problem.has.d_weight = 1;
    problem.max_workspace_bytes = budget;
    const logitless::Plan plan(context_, problem);
    SCOPED_TRACE(plan.info().config);
    logitless::Buffers b;
    b.hidden = hidden.as();
    b.weight = weight.as();
    b.targets = y.as();
    b.nll = nll.as();
    b.lse = lse.as();
    b.loss = loss.as();
    b.d_hidden = d_hidden.as();
    b.d_weight = d_weight.as();
    run_and_wait(plan, b);

    const std::vector<float> got_nll = nll.read<float>(), got_lse = lse.read<float>();
    const std::vector<int64_t> rows{0, s.tokens / 2, s.tokens - 2, s.tokens - 1};
    // Losses and d_hidden of some rows.
    expect_gradient(
        "d_hidden", d_hidden, hidden, rows, weight, s.vocab, s.hidden, 1, [&](size_t r, double* row) {
          const auto i = static_cast<size_t>(rows[r]);
          const double max = *std::max_element(row, row + s.vocab);
          double sum = 0;
          for (int64_t j = 0; j < s.vocab; ++j) sum += std::exp(row[j] - max);
          const double truth = max + std::log(sum);
          // Matrix instructions cut digits off, 16 products at a time; and there is a sum of V exponentials.
          const double bound = 0x1p-23 * (static_cast<double>(s.hidden) / 16 + 32) * (std::fabs(max) + 16);
          EXPECT_NEAR(got_lse[i], truth, bound) << "row " << i;
          EXPECT_NEAR(got_nll[i], truth - row[targets[i]], 2 * bound) << "row " << i;
          for (int64_t j = 0; j < s.vocab; ++j) row[j] = std::exp(row[j] - truth) - (j == targets[i] ? 1 : 0);
        });
    // d_weight of some ids, from the lse of all rows. Kept exp logits and the rows that they multiply are
    // rounded, and the sum between two chunks may be rounded as well.
    const std::vector<int64_t> ids{0, s.vocab / 2 + 1, s.vocab - 2, s.vocab - 1};
    expect_gradient("d_weight", d_weight, weight, ids, hidden, s.tokens, s.hidden, 3,
                    [&](size_t r, double* column) {
                      for (size_t i = 0; i < targets.size(); ++i) {
                        column[i] = std::exp(column[i] - double{got_lse[i]}) - (targets[i] == ids[r] ? 1 : 0);
                      }
                    });
    double sum = 0;
    for (float each : got_nll) sum += each;
    EXPECT_NEAR(loss.read<float>()[0], sum, 0x1p-22 * std::fabs(sum));
  }

  // Checks some rows of a gradient: dz's products with the n rows of `other`. dz_of(r, z) computes dz of the
  // r-th row from its logits.
  template <class F>
  static void expect_gradient(const char* what, const DeviceMemory& gradient, const DeviceMemory& of,
                              const std::vector<int64_t>& rows, const DeviceMemory& other, int64_t n,
                              int64_t depth, double roundings, const F& dz_of) {
    const auto m = static_cast<int64_t>(rows.size());
    const DeviceMemory list = uploaded(rows), logits(static_cast<size_t>(m * n) * 8);
    dots_kernel<<<blocks(m * n), 256>>>(of.as<__nv_bfloat16>(), list.as<int64_t>(), m,
                                        other.as<__nv_bfloat16>(), n, depth, logits.as<double>());
    std::vector<double> z = logits.read<double>();
    for (size_t r = 0; r < rows.size(); ++r) dz_of(r, z.data() + static_cast<int64_t>(r) * n);
    const DeviceMemory dz = uploaded(z);
    const DeviceMemory sums(static_cast<size_t>(m * depth) * 8), magnitudes(sums.size());
    sums_kernel<<<dim3(blocks(depth), static_cast<unsigned>(m)), 256>>>(
        dz.as<double>(), n, other.as<__nv_bfloat16>(), depth, sums.as<double>(), magnitudes.as<double>());
    expect_close(what, rows_of(gradient, rows, depth), sums, magnitudes, roundings, n);
  }
};

TEST_P(Large, MoreThanTwoToThe31Logits) {
  constexpr PlainSize kSizes{16640, 131080, 64};
  static_assert(kSizes.tokens * kSizes.vocab > int64_t{1} << 31);
  skip_unless_free(int64_t{12} << 30);
  if (IsSkipped()) return;
  for (size_t budget : {size_t{0}, size_t{2} << 30, size_t{256} << 20}) check(kSizes, budget);
}

TEST_P(Large, WeightOfMoreThanTwoToThe31Elements) {
  constexpr PlainSize kSizes{96, 262150, 8200};
  static_assert(kSizes.vocab * kSizes.hidden > int64_t{1} << 31);
  skip_unless_free(int64_t{24} << 30);
  if (IsSkipped()) return;
  for (size_t budget : {size_t{0}, size_t{64} << 20}) check(kSizes, budget);
}

// Rows are so far apart that their offsets need more than 32 bits. They have the bits of packed rows.
TEST_P(Large, StridesBeyondThirtyTwoBits) {
  constexpr int64_t kStride = (int64_t{1} << 30) + 8, kTokens = 4, kVocab = 5, kHidden = 8;
  skip_unless_free(int64_t{36} << 30);
  if (IsSkipped()) return;
  const Case c = plain_case(3, {kTokens, kVocab, kHidden}, LOGITLESS_BF16);
  const logitless::Plan plan(context_, pass_problem(c, logitless::Pass::forward_backward));
  PlainTensors tensors(c);
  logitless::Buffers b = tensors.buffers(LOGITLESS_FORWARD_BACKWARD);
  run_and_wait(plan, b);
  const std::vector<std::byte> packed = tensors.results();
  const auto far = [](int64_t rows) {
    return DeviceMemory(static_cast<size_t>((rows - 1) * kStride + kHidden) * 2);
  };
  const auto copy = [](void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t rows) {
    cuda_check(cudaMemcpy2D(to, static_cast<size_t>(to_stride) * 2, from,
                            static_cast<size_t>(from_stride) * 2, kHidden * 2, static_cast<size_t>(rows),
                            cudaMemcpyDeviceToDevice));
  };
  const DeviceMemory hidden = far(kTokens), d_hidden = far(kTokens);
  const DeviceMemory weight = far(kVocab), d_weight = far(kVocab);
  copy(hidden.as(), kStride, b.hidden, kHidden, kTokens);
  copy(weight.as(), kStride, b.weight, kHidden, kVocab);
  tensors.clear();
  logitless::Buffers apart = b;
  apart.hidden = hidden.as();
  apart.weight = weight.as();
  apart.d_hidden = d_hidden.as();
  apart.d_weight = d_weight.as();
  apart.hidden_stride = apart.weight_stride = apart.d_hidden_stride = apart.d_weight_stride = kStride;
  run_and_wait(plan, apart);
  copy(b.d_hidden, kHidden, d_hidden.as(), kStride, kTokens);
  copy(b.d_weight, kHidden, d_weight.as(), kStride, kVocab);
  EXPECT_EQ(tensors.results() == packed, true);
}

// No product writes the gradients where logits do not depend on the matrices. They are 0, and nothing between
// the rows changes.
TEST_P(Large, ClearedGradientsBeyondThirtyTwoBits) {
  constexpr int64_t kStride = (int64_t{1} << 30) + 8, kRows = 2, kHidden = 8;
  skip_unless_free(int64_t{6} << 30);
  if (IsSkipped()) return;
  Case c = plain_case(4, {kRows, kRows, kHidden}, LOGITLESS_BF16);
  c.problem.scale = 0;
  const logitless::Plan plan(context_, pass_problem(c, logitless::Pass::forward_backward));
  const PlainTensors tensors(c);
  const DeviceMemory d_hidden(static_cast<size_t>(kStride + kHidden) * 2), d_weight(d_hidden.size());
  logitless::Buffers b = tensors.buffers(LOGITLESS_FORWARD_BACKWARD);
  b.d_hidden = d_hidden.as();
  b.d_weight = d_weight.as();
  b.d_hidden_stride = b.d_weight_stride = kStride;
  run_and_wait(plan, b);
  for (const DeviceMemory* gradient : {&d_hidden, &d_weight}) {
    const auto elements = [&](int64_t first) {
      std::vector<uint16_t> out(kHidden);
      cuda_check(
          cudaMemcpy(out.data(), gradient->as<uint16_t>() + first, kHidden * 2, cudaMemcpyDeviceToHost));
      return out;
    };
    EXPECT_EQ(elements(0), std::vector<uint16_t>(kHidden, 0));
    EXPECT_EQ(elements(kStride), std::vector<uint16_t>(kHidden, 0));
    EXPECT_EQ(elements(kHidden), std::vector<uint16_t>(kHidden, 0xffff));
    EXPECT_EQ(elements(kStride - kHidden), std::vector<uint16_t>(kHidden, 0xffff));
  }
}

LOGITLESS_TEST_ON(Large, device_engines());

}  // namespace
}  // namespace logitless_test
