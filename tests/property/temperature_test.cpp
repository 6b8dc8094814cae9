// Temperatures, of all rows and of each row, on every engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "compare.h"

namespace logitless_test {
namespace {

class Temperature : public testing::TestWithParam<Engine> {
 protected:
  const Engine& engine() const { return GetParam(); }

  void expect_truth(const Case& c) const {
    SCOPED_TRACE(describe(c));
    const Expected expected(c);
    expected.check(engine(), solve(context_, c));
  }

  Case plain(uint64_t seed, PlainSize size) const {
    Case c = plain_case(seed, size, engine().plain_dtype());
    c.problem.has.entropy = c.problem.has.argmax = 1;
    return c;
  }

  logitless::Context context_ = make_context(GetParam());
};

// Temperatures between low and high, a different one for each row.
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

// Over all options: softcap, scale, bias, label smoothing, z-loss, weights, upstream gradients, dtypes.
TEST_P(Temperature, AgreesWithTheMaterialisedComputation) {
  int tested = 0;
  for (uint64_t seed = 9000; tested < 60; ++seed) {
    Case c = random_case(seed, {.allow_fp64 = engine().has_float64()});
    if (!engine().can_run(c.problem)) continue;
    ++tested;
    set_rows(&c, 0.1, 10);
    expect_truth(c);
    set_all(&c, 0.3);
    expect_truth(c);
  }
}

TEST_P(Temperature, OverSeveralBlocks) {
  for (Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kForwardThenBackward}) {
    for (double softcap : {0.0, 3.0}) {
      Case c = plain(3, engine().is_reference() ? PlainSize{20, 500, 8} : PlainSize{300, 1100, 40});
      c.problem.softcap = softcap;
      c.mode = mode;
      if (mode == Mode::kForward) {
        c.problem.has.d_hidden = c.problem.has.d_classifier = c.problem.has.d_bias = 0;
      }
      set_rows(&c, 0.1, 10);
      expect_truth(c);
    }
  }
}

// Logits of 1e4.
TEST_P(Temperature, SmallEnoughForHugeLogits) {
  for (double least : {1e-4, 1e-5}) {
    Case c = plain(4, {40, 300, 16});
    set_rows(&c, least, 1);
    expect_truth(c);
    set_all(&c, least);
    expect_truth(c);
  }
}

// A whole vocabulary in one run and in two shards.
TEST_P(Temperature, OfShardsIsThatOfAll) {
  Case c = plain(8, {30, 120, 12});
  c.mode = Mode::kForwardThenBackward;
  c.problem.softcap = 4;
  set_rows(&c, 0.1, 10);
  const Expected expected(c);
  const Outputs whole = solve(context_, c);
  std::vector<double> d_hidden(whole.d_hidden.size());
  std::vector<double> d_classifier, d_bias;
  for (int shard = 0; shard < 2; ++shard) {
    logitless::Problem p = pass_problem(c, logitless::Pass::backward);
    p.vocab_total = p.vocab;
    p.vocab_start = shard * 50;
    p.vocab = shard == 0 ? 50 : p.vocab - 50;
    p.dtype.d_hidden = LOGITLESS_F32;
    const Outputs part = run_pass(context_, p, c, &whole);
    for (size_t i = 0; i < d_hidden.size(); ++i) d_hidden[i] += part.d_hidden[i];
    d_classifier.insert(d_classifier.end(), part.d_classifier.begin(), part.d_classifier.end());
    d_bias.insert(d_bias.end(), part.d_bias.begin(), part.d_bias.end());
  }
  const Bounds bounds = expected.bounds_of(engine());
  EXPECT_TRUE(close("d_hidden", d_hidden, expected.truth().d_hidden, bounds.d_hidden, LOGITLESS_F32));
  EXPECT_TRUE(close("d_classifier", d_classifier, expected.truth().d_classifier, bounds.d_classifier,
                    engine().plain_dtype()));
  EXPECT_TRUE(close("d_bias", d_bias, expected.truth().d_bias, bounds.d_bias, engine().plain_dtype()));
}

TEST_P(Temperature, OfOneChangesNothing) {
  if (engine().is_device()) GTEST_SKIP() << "another kernel";
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Case c = random_case(seed, {.allow_fp64 = engine().has_float64()});
    if (!engine().can_run(c.problem)) continue;
    set_all(&c, 1);
    Case rows = c;
    set_rows(&rows, 1, 1);
    EXPECT_STREQ(first_difference(solve(context_, c), solve(context_, rows)), "") << describe(c);
  }
}

// One of all rows is scale, softcap and bias over it: with a power of two to the bit, at no cost.
TEST_P(Temperature, OfAllRowsIsInTheOtherNumbers) {
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
    Outputs expected = solve(context_, other);
    for (double& d : expected.d_bias) d *= 2;
    EXPECT_STREQ(first_difference(solve(context_, c), expected), "");
  }
}

// A row of a temperature that is none is NaN; the others are as they were. In exact and thinned gradients.
TEST_P(Temperature, ThatIsNoneMakesItsRowNaN) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double wrong[] = {0, -0.0, -1, NAN, infinity, -infinity, 1e-40, 3e38};
  for (logitless_gradient gradient : {LOGITLESS_EXACT, LOGITLESS_ALWAYS_THINNED}) {
    for (Mode mode : {Mode::kForward, Mode::kForwardBackward, Mode::kForwardThenBackward}) {
      for (double softcap : {0.0, 2.0}) {
        Case c = plain(5, {24, 200, 16});
        c.mode = mode;
        c.problem.softcap = softcap;
        c.problem.gradient = gradient;
        c.problem.reduction = LOGITLESS_REDUCTION_NONE;
        c.grad_loss.assign(24, 1);
        if (mode == Mode::kForward) {
          c.problem.has.d_hidden = c.problem.has.d_classifier = c.problem.has.d_bias = 0;
          c.grad_loss.clear();
        }
        if (gradient != LOGITLESS_EXACT && !engine().can_thin(c.problem)) continue;
        set_rows(&c, 0.5, 2);
        const Outputs good = solve(context_, c);
        const Bounds bounds = Expected(c).bounds_of(engine());
        const double most = std::max({bounds.loss, bounds.nll, bounds.lse, bounds.entropy});
        for (size_t i = 0; i < std::size(wrong); ++i) c.temperature[3 * i] = wrong[i];
        c.targets[0] = c.problem.ignore_index;
        const Outputs got = solve(context_, c);
        SCOPED_TRACE(testing::Message() << "gradient " << gradient << ", " << describe(c));
        const auto width = static_cast<size_t>(c.problem.hidden);
        for (size_t row = 0; row < c.targets.size(); ++row) {
          const bool is_wrong = row % 3 == 0;
          for (const auto& values : {&Outputs::loss, &Outputs::nll, &Outputs::lse, &Outputs::entropy}) {
            if (row == 0) {
              EXPECT_EQ((got.*values)[row], 0);
            } else if (is_wrong) {
              EXPECT_TRUE(std::isnan((got.*values)[row])) << "row " << row << ": " << (got.*values)[row];
            } else if (engine().is_device()) {  // which may compute a block of rows again for one of them
              EXPECT_NEAR((got.*values)[row], (good.*values)[row], 2 * most) << row;
            } else {
              EXPECT_EQ((got.*values)[row], (good.*values)[row]) << row;
            }
          }
          if (got.d_hidden.empty()) continue;
          const auto first = got.d_hidden.begin() + static_cast<std::ptrdiff_t>(row * width);
          const auto last = first + static_cast<std::ptrdiff_t>(width);
          if (row == 0) {
            EXPECT_TRUE(std::all_of(first, last, [](double d) { return d == 0; }));
          } else if (is_wrong) {
            EXPECT_TRUE(std::all_of(first, last, [](double d) { return std::isnan(d); })) << row;
          } else {
            EXPECT_TRUE(std::all_of(first, last, [](double d) { return std::isfinite(d); })) << row;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Temperature, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
