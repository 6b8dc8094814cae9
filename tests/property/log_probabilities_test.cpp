// Log-probabilities of 16-bit operands are those of logits that are never rounded to 16 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {
namespace {

constexpr double kLargestLogit = 40, kMostError = 1e-5;

// The largest |logit| of every row is just below kLargestLogit.
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
      for (size_t k = 0; k < depth; ++k) z += row[k] * c.classifier[j * depth + k];
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
  // what is over: of them no more is asked than the derived bound.
  double limit(const Expected& expected) const {
    const bool rounds_each = !is_device() && engine().isa != "avx512_bf16";
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

}  // namespace
}  // namespace logitless_test
