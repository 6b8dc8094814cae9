// Rows without a target are never multiplied: whatever they hold, nothing changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine_test.h"

namespace logitless_test {
namespace {

class IgnoredRows : public EngineTest {};

std::vector<bool> ignored_rows(const Case& c) {
  std::vector<bool> out;
  for (int64_t row = 0; row < c.problem.tokens; ++row)
    out.push_back(c.target_of(row) == c.problem.ignore_index);
  return out;
}

// Puts NaN in everything that belongs to the ignored rows.
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
  for (const Case& c : random_cases(100, 40, {}, [](Case* each) {
         const std::vector<bool> ignored = ignored_rows(*each);
         return std::count(ignored.begin(), ignored.end(), true) > 0;
       })) {
    const std::vector<bool> ignored = ignored_rows(c);
    SCOPED_TRACE(describe(c));
    Case sparsified = c;
    sparsified.problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
    sparsified.problem.threshold = 0x1p-4;
    if (why_not_sparsified(engine()).empty() && c.wants_gradients() && engine().can_sparsify(c.problem)) {
      EXPECT_STREQ(first_difference(solve(poisoned(sparsified)), solve(sparsified)), "");
    }
    const Outputs got = solve(poisoned(c));
    EXPECT_STREQ(first_difference(got, solve(c)), "");
    const auto width = static_cast<size_t>(c.problem.hidden);
    for (size_t i = 0; i < ignored.size(); ++i) {
      if (!ignored[i]) continue;
      for (const ListedTensor& each : kTensors) {
        const std::vector<double>& values = got.*each.values;
        if (!each.is_of_rows() || values.size() != ignored.size()) continue;
        const double none = each.values == &Outputs::max      ? -INFINITY
                            : each.values == &Outputs::argmax ? -1
                                                              : 0;
        EXPECT_EQ(values[i], none) << each.name;
      }
      for (size_t k = i * width; k < (i + 1) * width && !got.d_hidden.empty(); ++k) {
        EXPECT_EQ(got.d_hidden[k], c.problem.accumulate.d_hidden ? c.d_hidden_start[k] : 0);
      }
    }
  }
}

// Removing them is the same as ignoring them.
TEST_P(IgnoredRows, MayBeAbsent) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Case c = plain(seed, {37, 61, 19});
    Random random(seed);
    std::vector<size_t> valid;
    for (size_t row = 0; row < c.targets.size(); ++row) {
      if (random.chance(0.5)) {
        c.targets[row] = c.problem.ignore_index;
      } else {
        valid.push_back(row);
      }
    }
    const Case fewer = rows_of(c, valid);
    const Outputs with = solve(c);
    const Outputs without = solve(fewer);
    EXPECT_EQ(with.valid_count, without.valid_count);
    if (is_device()) {  // another plan, and other sizes of the products
      const Expected expected(fewer);
      expected.check(engine(), without);
      EXPECT_TRUE(
          close("loss", with.loss, expected.truth().loss, expected.bounds_of(engine()).loss, LOGITLESS_F32));
      EXPECT_TRUE(close("d_weight", with.d_weight, expected.truth().d_weight,
                        expected.bounds_of(engine()).d_weight, engine().plain_dtype()));
      continue;
    }
    EXPECT_EQ(with.loss, without.loss);
    EXPECT_EQ(with.d_weight, without.d_weight);
    EXPECT_EQ(with.d_bias, without.d_bias);
  }
}

LOGITLESS_TEST_ON(IgnoredRows, engines());

}  // namespace
}  // namespace logitless_test
