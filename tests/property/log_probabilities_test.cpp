// Log-probabilities of 16-bit operands are those of logits that are never rounded to 16 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {
namespace {

constexpr double kLargestLogit = 40, kMostError = 1e-5;

// A case in which the largest |logit| of every row is just below kLargestLogit.
Case steep_case(uint64_t seed, PlainSize size) {
  Case c = plain_case(seed, size, LOGITLESS_BF16);
  remove_bias(&c);
  c.problem.batch_invariant = 1;
  const auto depth = static_cast<size_t>(size.hidden), columns = static_cast<size_t>(size.vocab);
  for (size_t i = 0; i < static_cast<size_t>(size.tokens); ++i) {
    double* row = c.hidden.data() + i * depth;
    double largest = 0;
    for (size_t j = 0; j < columns; ++j) {
      double z = 0;
      for (size_t k = 0; k < depth; ++k) z += row[k] * c.weight[j * depth + k];
      largest = std::max(largest, std::fabs(z));
    }
    for (size_t k = 0; k < depth; ++k)
      row[k] = rounded(0.99 * kLargestLogit / largest * row[k], LOGITLESS_BF16);
  }
  return c;
}

class LogProbabilities : public EngineTest {
 protected:
  // Instructions that multiply 16-bit numbers in pairs or more add these up before they round, or cut off
  // what is over. They only have to keep the derived bound.
  double limit(const Expected& expected) const {
    const bool rounds_each = !is_device() && engine().engine != "avx512_bf16";
    return rounds_each ? kMostError : std::max(kMostError, expected.bounds_of(engine()).nll);
  }
};

TEST_P(LogProbabilities, AreWithinOneHundredThousandthSlow) {
  for (const PlainSize size : {PlainSize{60, 700, 64}, {40, 2000, 512}, {8, 500, 4096}}) {
    const Case c = steep_case(7, size);
    SCOPED_TRACE(describe(c));
    if (!engine().can_run(c.problem)) continue;
    const Expected expected(c);
    for (const logitless::Pass pass : {logitless::Pass::forward, logitless::Pass::forward_backward}) {
      const Outputs got = run_pass(context_, pass_problem(c, pass), c);
      double most = 0;
      for (size_t i = 0; i < got.nll.size(); ++i) {
        most = std::max(most, std::fabs(got.nll[i] - expected.truth().nll[i]));
      }
      EXPECT_LE(most, limit(expected));
      RecordProperty("most_error_1e9_" + std::to_string(size.hidden), static_cast<int>(most * 1e9));
    }
  }
}

LOGITLESS_TEST_ON(LogProbabilities, engines());

// Long sums in float32 are sums of partial sums: their rounding does not grow with the number of terms as it
// does in one chain.
// The fair error is twice that of partial sums of 256 terms that are added in order, and a rounding of the
// result. Errors are root mean squares over many results.
class LongSums : public EngineTest {
 protected:
  void SetUp() override {
    if (is_device()) GTEST_SKIP() << "sums of tensor cores and of cuBLAS";
  }
};

// Terms and their sum in blocks.
class BlockedSum {
 public:
  void add(double x, double y) {
    exact_ += x * y;
    part_ = std::fma(static_cast<float>(x), static_cast<float>(y), part_);
    if (++count_ % 256 == 0) close();
  }
  double exact() const { return exact_; }
  double blocked() {
    close();
    return total_;
  }

 private:
  void close() {
    total_ += part_;
    part_ = 0;
  }
  double exact_ = 0;
  float total_ = 0, part_ = 0;
  int64_t count_ = 0;
};

struct Errors {
  double got = 0, fair = 0;
  void add(double result, BlockedSum sum) {
    got += std::pow(result - sum.exact(), 2);
    fair += std::pow(2 * (sum.blocked() - sum.exact()), 2) + std::pow(0x1p-24 * sum.exact(), 2);
  }
};

TEST_P(LongSums, InLogits) {
  for (logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16}) {
    for (int64_t hidden : {256, 1024, 4096, 16384}) {
      const int64_t tokens = 300;
      Case c = plain_case(1, {tokens, 1, hidden}, dtype);
      c.mode = Mode::kForward;
      c.bias = {0};
      const Outputs got = solve(c);
      Errors errors;
      for (size_t i = 0; i < tokens; ++i) {
        BlockedSum sum;
        for (size_t k = 0; k < static_cast<size_t>(hidden); ++k)
          sum.add(c.hidden[i * static_cast<size_t>(hidden) + k], c.weight[k]);
        errors.add(got.max[i], sum);  // the only column's logit
      }
      EXPECT_LE(errors.got, errors.fair)
          << name_of(dtype) << ", D " << hidden << ": " << std::sqrt(errors.got / errors.fair);
    }
  }
}

// Sums over tokens, for the gradients of the weight and of the bias.
TEST_P(LongSums, OverTokens) {
  constexpr int64_t kTokens = 16384, kVocab = 64;
  Case c = plain_case(2, {kTokens, kVocab, 2});
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  std::fill(c.targets.begin(), c.targets.end(), 0);  // sums of the other columns have terms of one sign
  const Answer truth = materialise<double>(c);
  for (size_t first_chunk : {size_t{0}, size_t{1}}) {
    const Outputs got = solve(c, first_chunk == 0 ? 0 : size_t{4} << 20);
    Errors bias, weight;
    for (size_t j = 1; j < kVocab; ++j) {
      BlockedSum of_bias, of_weight;
      for (size_t i = 0; i < kTokens; ++i) {
        const double p = static_cast<float>(std::exp(truth.logits[i * kVocab + j] - truth.lse[i]));
        of_bias.add(p, 1);
        of_weight.add(p, c.hidden[2 * i]);
      }
      bias.add(got.d_bias[j], of_bias);
      weight.add(got.d_weight[2 * j], of_weight);
    }
    EXPECT_LE(bias.got, bias.fair) << std::sqrt(bias.got / bias.fair);
    EXPECT_LE(weight.got, weight.fair) << std::sqrt(weight.got / weight.fair);
  }
}

LOGITLESS_TEST_ON(LongSums, engines());

}  // namespace
}  // namespace logitless_test
