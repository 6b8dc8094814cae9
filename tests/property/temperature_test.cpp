// Temperatures, of all rows and of each row, on every engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine_test.h"

namespace logitless_test {
namespace {

class Temperature : public EngineTest {
 protected:
  Case plain(uint64_t seed, PlainSize size) const {
    Case c = EngineTest::plain(seed, size);
    c.problem.has.entropy = c.problem.has.argmax = 1;
    return c;
  }
};

// Sets temperatures between low and high, a different one for each row.
void set_rows(Case* c, double low, double high) {
  Random random(c->seed + 1);
  c->problem.temperature = 1;
  c->problem.has.temperature = 1;
  c->temperature.clear();
  for (int64_t row = 0; row < c->problem.tokens; ++row) {
    const double t = std::exp(random.uniform(std::log(low), std::log(high)));
    c->temperature.push_back(stats_dtype(c->problem) == LOGITLESS_F64 ? t : static_cast<float>(t));
  }
}

void set_all(Case* c, double temperature) {
  c->problem.has.temperature = 0;
  c->temperature.clear();
  c->problem.temperature = temperature;
}

// The logits are 1e4.
TEST_P(Temperature, SmallEnoughForHugeLogits) {
  for (double least : {1e-4, 1e-5}) {
    Case c = plain(4, {40, 300, 16});
    set_rows(&c, least, 1);
    expect_truth(c);
    set_all(&c, least);
    expect_truth(c);
  }
}

TEST_P(Temperature, OneChangesNothing) {
  if (engine().is_device()) GTEST_SKIP() << "another kernel";
  for (Case c : random_cases(0, 10)) {
    set_all(&c, 1);
    Case rows = c;
    set_rows(&rows, 1, 1);
    EXPECT_STREQ(first_difference(solve(c), solve(rows)), "") << describe(c);
  }
}

// One temperature of all rows divides scale, softcap and bias: with a power of two to the bit, at no cost.
TEST_P(Temperature, OneOfAllRowsDividesTheOtherNumbers) {
  for (double softcap : {0.0, 3.0}) {
    Case c = plain(6, {40, 300, 16});
    c.problem.scale = 0.75;
    c.problem.softcap = softcap;
    c.problem.dtype.d_bias = LOGITLESS_F32;
    Case other = c;
    set_all(&c, 0.5);
    other.problem.scale *= 2;
    other.problem.softcap *= 2;
    for (double& bias : other.bias) bias *= 2;
    Outputs expected = solve(other);
    for (double& d : expected.d_bias) d *= 2;
    EXPECT_STREQ(first_difference(solve(c), expected), "");
  }
}

// A row with an invalid temperature is NaN; the others are as they were, with exact and with sparsified
// gradients.
TEST_P(Temperature, AnInvalidOneMakesItsRowNaN) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double wrong[] = {0, -0.0, -1, NAN, infinity, -infinity, 1e-40, 3e38};
  for (logitless_gradient gradient : {LOGITLESS_EXACT, LOGITLESS_ALWAYS_SPARSIFIED}) {
    for (Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kForwardThenBackward}) {
      for (double softcap : {0.0, 2.0}) {
        Case c = plain(5, {24, 200, 16});
        c.mode = mode;
        c.problem.softcap = softcap;
        c.problem.gradient = gradient;
        c.problem.reduction = LOGITLESS_REDUCTION_NONE;
        c.grad_loss.assign(24, 1);
        if (gradient != LOGITLESS_EXACT && !engine().can_sparsify(c.problem)) continue;
        set_rows(&c, 0.5, 2);
        const Outputs good = solve(c);
        const Bounds bounds = Expected(c).bounds_of(engine());
        const double most = std::max({bounds.loss, bounds.nll, bounds.lse, bounds.entropy});
        for (size_t i = 0; i < std::size(wrong); ++i) c.temperature[3 * i] = wrong[i];
        c.targets[0] = c.problem.ignore_index;
        const Outputs got = solve(c);
        SCOPED_TRACE(testing::Message() << "gradient " << gradient << ", " << describe(c));
        for (size_t row = 0; row < c.targets.size(); ++row) {
          const bool is_wrong = row % 3 == 0;
          for (const auto& values : {&Outputs::loss, &Outputs::nll, &Outputs::lse, &Outputs::entropy}) {
            if (row == 0) {
              EXPECT_EQ((got.*values)[row], 0);
            } else if (is_wrong) {
              EXPECT_TRUE(std::isnan((got.*values)[row])) << "row " << row << ": " << (got.*values)[row];
            } else if (engine().is_device()) {  // it may compute a block of rows again for one of them
              EXPECT_NEAR((got.*values)[row], (good.*values)[row], 2 * most) << row;
            } else {
              EXPECT_EQ((got.*values)[row], (good.*values)[row]) << row;
            }
          }
          if (got.d_hidden.empty()) continue;
          const std::vector<double> d_hidden = rows_of(got.d_hidden, c.targets.size(), {row});
          if (row == 0) {
            EXPECT_TRUE(all_are(0, d_hidden));
          } else {
            EXPECT_TRUE(is_wrong ? all_are(NAN, d_hidden) : all_finite(d_hidden)) << row;
          }
        }
      }
    }
  }
}

LOGITLESS_TEST_ON(Temperature, engines());

}  // namespace
}  // namespace logitless_test
