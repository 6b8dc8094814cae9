// Rows without a target are never multiplied: whatever they hold, nothing changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "compare.h"
#include "row_fields.h"

namespace logitless_test {
namespace {

class IgnoredRows : public testing::TestWithParam<Engine> {
 protected:
  logitless::Context context_ = make_context(GetParam());
};

std::vector<bool> ignored_rows(const Case& c) {
  std::vector<bool> out;
  for (int64_t row = 0; row < c.problem.tokens; ++row)
    out.push_back(c.target_of(row) == c.problem.ignore_index);
  return out;
}

// NaN in everything that belongs to the ignored rows.
Case poisoned(Case c) {
  const std::vector<bool> ignored = ignored_rows(c);
  const auto poison = [&](std::vector<double>* values, size_t width) {
    for (size_t i = 0; i < values->size(); ++i) {
      if (ignored[i / width]) (*values)[i] = NAN;
    }
  };
  poison(&c.hidden, static_cast<size_t>(c.problem.hidden));
  for (auto* rows :
       {&c.token_weight, &c.temperature, &c.grad_nll, &c.grad_lse, &c.grad_entropy, &c.grad_target_logit})
    poison(rows, 1);
  if (c.problem.reduction == LOGITLESS_REDUCTION_NONE) poison(&c.grad_loss, 1);
  return c;
}

TEST_P(IgnoredRows, MayHoldNaN) {
  int tested = 0;
  for (uint64_t seed = 100; tested < 40; ++seed) {
    const Case c = random_case(seed, {.allow_fp64 = GetParam().has_float64()});
    const std::vector<bool> ignored = ignored_rows(c);
    if (std::count(ignored.begin(), ignored.end(), true) == 0 || !GetParam().can_run(c.problem)) continue;
    ++tested;
    SCOPED_TRACE(describe(c));
    const Outputs got = solve(context_, poisoned(c));
    EXPECT_STREQ(first_difference(got, solve(context_, c)), "");
    const auto width = static_cast<size_t>(c.problem.hidden);
    for (size_t i = 0; i < ignored.size(); ++i) {
      if (!ignored[i]) continue;
      const auto is_zero = [&](const RowField& each) {
        return !each.is_wanted(c.problem) || (got.*each.values)[i] == 0;
      };
      for (const RowField& each : kRowOutputs) EXPECT_TRUE(is_zero(each)) << each.name;
      for (const RowField& each : kRowSums) EXPECT_TRUE(is_zero(each)) << each.name;
      EXPECT_EQ(got.max[i], -INFINITY);
      if (c.problem.reduction == LOGITLESS_REDUCTION_NONE) {
        EXPECT_EQ(got.loss[i], 0);
      }
      if (c.problem.has.argmax) {
        EXPECT_EQ(got.argmax[i], -1);
        EXPECT_EQ(got.is_top1[i], 0);
      }
      for (size_t k = i * width; k < (i + 1) * width && !got.d_hidden.empty(); ++k) {
        EXPECT_EQ(got.d_hidden[k], c.problem.accumulate.d_hidden ? c.d_hidden_start[k] : 0);
      }
    }
  }
}

TEST_P(IgnoredRows, MayHoldNaNBesideThinnedGradients) {
  if (const std::string why = why_not_thinned(GetParam()); !why.empty()) GTEST_SKIP() << why;
  int tested = 0;
  for (uint64_t seed = 500; tested < 20; ++seed) {
    Case c = random_case(seed, {.allow_fp64 = GetParam().is_reference()});
    const std::vector<bool> ignored = ignored_rows(c);
    if (std::count(ignored.begin(), ignored.end(), true) == 0 || !GetParam().can_run(c.problem)) continue;
    if (!c.wants_gradients() || !GetParam().can_thin(c.problem)) continue;
    ++tested;
    c.problem.gradient = LOGITLESS_ALWAYS_THINNED;
    c.problem.threshold = 0x1p-4;
    EXPECT_STREQ(first_difference(solve(context_, poisoned(c)), solve(context_, c)), "") << describe(c);
  }
}

// Removing them is the same as ignoring them.
TEST_P(IgnoredRows, MayBeAbsent) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Case c = plain_case(seed, {37, 61, 19}, GetParam().plain_dtype());
    Case fewer = c;
    fewer.targets.clear();
    fewer.hidden.clear();
    Random random(seed);

    for (size_t row = 0; row < c.targets.size(); ++row) {
      if (random.chance(0.5)) {
        c.targets[row] = c.problem.ignore_index;
        continue;
      }
      fewer.targets.push_back(c.targets[row]);
      fewer.hidden.insert(fewer.hidden.end(), c.hidden.begin() + static_cast<std::ptrdiff_t>(row * 19),
                          c.hidden.begin() + static_cast<std::ptrdiff_t>((row + 1) * 19));
    }
    fewer.problem.tokens = static_cast<int64_t>(fewer.targets.size());
    const Outputs with = solve(context_, c);
    const Outputs without = solve(context_, fewer);
    EXPECT_EQ(with.valid_count, without.valid_count);
    if (GetParam().is_device()) {  // another plan, and other sizes of the products
      const Expected expected(fewer);
      expected.check(GetParam(), without);
      EXPECT_TRUE(close("loss", with.loss, expected.truth().loss, expected.bounds_of(GetParam()).loss,
                        LOGITLESS_F32));
      EXPECT_TRUE(close("d_classifier", with.d_classifier, expected.truth().d_classifier,
                        expected.bounds_of(GetParam()).d_classifier, GetParam().plain_dtype()));
      continue;
    }
    EXPECT_EQ(with.loss, without.loss);
    EXPECT_EQ(with.d_classifier, without.d_classifier);
    EXPECT_EQ(with.d_bias, without.d_bias);
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, IgnoredRows, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
