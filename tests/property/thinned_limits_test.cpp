// Thinned gradients of numbers at the ends of their ranges: every run ends, and tiny thresholds keep all.
// A run that does not end is one that takes longer than ctest allows this program.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats.h"
#include "thinned_fixture.h"

namespace logitless_test {
namespace {

class ThinnedLimits : public ThinnedTest {};

// All logits the same, of a size that no logarithm of a sum changes; of either sign.
TEST_P(ThinnedLimits, HugeEqualLogitsEnd) {
  const int64_t vocab = engine().is_reference() ? 600 : 4096;
  for (double value : {1e3, 1e5, 1e9, 0x1p62, -1e9, -0x1p62}) {
    // Logits of the reference are float64, and those of 1e9 no numbers that a saved lse has all digits of.
    if (engine().is_reference() && std::fabs(value) == 1e9) continue;
    Case c = thinned({2, vocab, 8}, 0x1p-6);
    std::fill(c.hidden.begin(), c.hidden.end(), rounded(std::fabs(value), engine().plain_dtype()));
    std::fill(c.classifier.begin(), c.classifier.end(), rounded(value, engine().plain_dtype()));
    std::fill(c.bias.begin(), c.bias.end(), 0);
    c.targets = {1, vocab - 1};
    c.problem.reduction = LOGITLESS_REDUCTION_SUM;
    SCOPED_TRACE(value);
    for (const Outputs& got : all_ways(c)) {
      double sum = 0;  // of dz: draws for all but the target's part
      for (double v : got.d_bias) sum += v;
      EXPECT_NEAR(sum, 0, 6 * std::sqrt(c.problem.threshold * 2));
      for (double kept : got.kept_count) {
        const double most = 1 / c.problem.threshold + std::sqrt(128 / c.problem.threshold) + 49;
        EXPECT_LE(kept, most + (is_device() ? 8 + static_cast<double>(vocab) / 96 : 0));
        EXPECT_GE(kept, 2);
      }
    }
  }
}

// Largest and smallest finite logits, one of them far from all others, infinities and NaN: no end of any loop
// depends on them.
TEST_P(ThinnedLimits, AnyLogitsEnd) {
  constexpr double kMost = 3e38;
  for (double common : {kMost, -kMost, 1e30, -1e31, 0.0, static_cast<double>(NAN)}) {
    for (double odd : {kMost, -kMost, 1e20, static_cast<double>(NAN), static_cast<double>(INFINITY),
                       -static_cast<double>(INFINITY)}) {
      Case c = thinned({2, 1500, 2}, 0x1p-5);
      c.problem.dtype.bias = LOGITLESS_F32;
      std::fill(c.classifier.begin(), c.classifier.end(), 0);
      std::fill(c.bias.begin(), c.bias.end(), rounded(common, LOGITLESS_F32));
      c.targets = {1, 700};
      for (size_t at : {size_t{0}, size_t{700}, size_t{1499}}) {
        Case one = c;
        one.bias[at] = std::isfinite(odd) ? rounded(odd, LOGITLESS_F32) : odd;
        for (const Outputs& got : all_ways(one)) {
          if (!std::isfinite(common) || std::isnan(odd) || odd == INFINITY) continue;
          SCOPED_TRACE(testing::Message() << common << ", one of " << odd << " at " << at);
          double sum = 0;
          for (double v : got.d_bias) sum += v;
          EXPECT_NEAR(sum, 0, 6 * std::sqrt(c.problem.threshold / 2));
        }
      }
    }
  }
}

// Nothing is below such thresholds: the gradient is exact, however many 1 / threshold are.
TEST_P(ThinnedLimits, TinyThresholdsKeepAll) {
  for (int64_t vocab : {10, 20, 449}) {
    for (double threshold : {1e-12, 1e-30, 0x1p-126}) {
      const Case c = thinned({5, vocab, 3}, threshold);
      const Expected expected(c);
      const Bounds bounds = expected.bounds_of(engine());
      SCOPED_TRACE(testing::Message() << "threshold " << threshold << ", " << describe(c));
      for (const Outputs& got : all_ways(c)) {
        expect_gradients(got, expected.truth(), bounds);
      }
    }
  }
}

// Weights are float32: thresholds below its normal numbers are refused, and the message says so.
TEST_P(ThinnedLimits, ThresholdsThatFloat32HasNot) {
  for (double threshold : {0x1.fp-127, 1e-40, 0x1p-150, 1e-46, 5e-324}) {
    const Case c = thinned({4, 20, 2}, threshold);
    for (logitless::Pass pass : {logitless::Pass::forward_backward, logitless::Pass::backward}) {
      try {
        logitless::Plan plan(context_, pass_problem(c, pass));
        ADD_FAILURE() << threshold << " is not refused";
      } catch (const logitless::Error& error) {
        EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
        EXPECT_NE(std::string(error.what()).find("threshold: expected a number in [1.17549435e-38, 1]"),
                  std::string::npos)
            << error.what();
        EXPECT_EQ(std::string(error.what()).find("got 0"), std::string::npos) << error.what();
      }
    }
  }
}

LOGITLESS_TEST_ON(ThinnedLimits, engines());

}  // namespace
}  // namespace logitless_test
