// With batch_invariant a row's statistics have the same bits alone, in any batch, under any budget and in any
// pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <string>

#include "engine_test.h"
#include "formats.h"

namespace logitless_test {
namespace {

using Rows = std::vector<size_t>;

Rows first_rows(size_t count) {
  Rows rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Names the first output for rows in which `some` does not have the bits of these rows of `all`; empty for
// none.
std::string difference(const Outputs& some, const Outputs& all, size_t tokens, const Rows& rows) {
  for (const ListedTensor& each : kTensors) {
    if (each.is_of_rows() && !same_bits(some.*each.values, rows_of(all.*each.values, tokens, rows)))
      return each.name;
  }
  return "";
}

struct Variant {
  const char* name;
  std::function<void(Case*)> change;
};

// Makes rows whose target is far below their largest logit, so that exp logits relative to it leave the range
// of fp32.
void make_steep(Case* c) {
  const auto depth = static_cast<size_t>(c->problem.hidden);
  for (size_t row = 0; row < c->targets.size(); row += 37) {
    for (size_t k = 0; k < depth; ++k) c->hidden[row * depth + k] *= 64;
  }
}

void ignore_some(Case* c) {
  for (size_t row = 0; row < c->targets.size(); ++row) {
    if (row % 3 == 0 || (row >= 128 && row < 300)) c->targets[row] = c->problem.ignore_index;
  }
}

std::vector<Variant> variants() {
  return {
      {"plain", [](Case* c) { remove_bias(c); }},
      {"bias, softcap, entropy",
       [](Case* c) {
         c->problem.softcap = 5;
         c->problem.has.entropy = c->problem.has.argmax = 1;
       }},
      {"scale, temperatures, ignored rows",
       [](Case* c) {
         c->problem.scale = 0.7;
         c->problem.has.temperature = 1;
         Random random(5);
         for (int64_t row = 0; row < c->problem.tokens; ++row) {
           c->temperature.push_back(rounded(random.uniform(0.25, 2), stats_dtype(c->problem)));
         }
         ignore_some(c);
       }},
      {"label smoothing, class weights",
       [](Case* c) {
         c->problem.label_smoothing = 0.25;
         c->problem.has.class_weight = c->problem.has.entropy = 1;
         c->class_weight.assign(static_cast<size_t>(c->problem.vocab), 0.5);
       }},
      {"steep rows, entropy",
       [](Case* c) {
         c->problem.has.entropy = 1;
         make_steep(c);
       }},
      {"steep rows, ignored rows",
       [](Case* c) {
         remove_bias(c);
         make_steep(c);
         ignore_some(c);
       }},
  };
}

class BatchInvariance : public EngineTest {
 protected:
  // Many rows, and on a device so many columns that tiles of a row would share partials. Slow engines take
  // fewer.
  PlainSize size(int64_t hidden) const {
    if (is_device()) return {1024, 12007, hidden};
    const bool slow = engine().is_reference() || engine().engine == "portable" || is_slowed_down();
    return slow ? PlainSize{220, 500, hidden} : PlainSize{1024, 3011, hidden};
  }

  std::vector<logitless_dtype> dtypes() const {
    std::vector<logitless_dtype> out;
    for (const logitless_dtype dtype : {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F16, LOGITLESS_F64}) {
      if (engine().can_run(plain_case(1, {1, 1, 1}, dtype).problem)) out.push_back(dtype);
    }
    return out;
  }

  static Case case_of(const Variant& variant, PlainSize size, logitless_dtype dtype, bool invariant = true) {
    Case c = plain_case(11, size, dtype);
    c.problem.reduction = LOGITLESS_REDUCTION_NONE;
    c.problem.batch_invariant = invariant;
    variant.change(&c);
    return c;
  }

  // Uses every variant in every dtype. Rows of the second depth are no whole 16 bytes, so that a device
  // copies them.
  template <class Use>
  void for_each_case(const Use& use, int64_t tokens = 0) const {
    for (const logitless_dtype dtype : dtypes()) {
      for (const Variant& variant : variants()) {
        for (const int64_t hidden : {64, 37}) {
          const bool is_steep = std::string_view(variant.name).starts_with("steep");
          if (hidden == 37 && !is_steep) continue;
          PlainSize some = size(hidden);
          if (tokens != 0) some.tokens = tokens;
          const Case c = case_of(variant, some, dtype);
          SCOPED_TRACE(std::string(variant.name) + ": " + describe(c));
          use(c);
        }
      }
    }
  }

  Outputs run(const Case& c, logitless::Pass pass, size_t budget = 0) const {
    logitless::Problem problem = pass_problem(c, pass);
    problem.max_workspace_bytes = budget;
    return run_pass(context_, problem, c);
  }
  Outputs forward(const Case& c) const { return run(c, logitless::Pass::forward); }
  Outputs both(const Case& c) const { return run(c, logitless::Pass::forward_backward); }

  // Expects both passes to have the rollout's statistics, under every budget and in every plan.
  void expect_same_in_every_plan(const Case& c, const Outputs& rollout) const {
    const auto tokens = static_cast<size_t>(c.problem.tokens);
    for (const logitless::Pass pass : {logitless::Pass::forward, logitless::Pass::forward_backward}) {
      logitless::Problem problem = pass_problem(c, pass);
      std::set<size_t> budgets{0};
      for (const size_t most : {size_t{0}, size_t{1}, size_t{1} << 20, size_t{3} << 20, size_t{8} << 20}) {
        problem.max_workspace_bytes = most;
        budgets.merge(plan_bytes(problem));
      }
      for (const size_t budget : budgets) {
        EXPECT_EQ(difference(run(c, pass, budget), rollout, tokens, first_rows(tokens)), "")
            << "pass " << static_cast<int>(pass) << " within " << budget;
      }
    }
  }
};

TEST_P(BatchInvariance, RowsAloneAndInBatches) {
  for_each_case([&](const Case& c) {
    const auto tokens = static_cast<size_t>(c.problem.tokens);
    const Outputs all = forward(c);
    const Rows order = shuffled_rows(tokens, 3);
    for (const size_t count : {size_t{1}, size_t{7}, size_t{128}, tokens}) {
      const Rows rows(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count));
      EXPECT_EQ(difference(forward(rows_of(c, rows)), all, tokens, rows), "") << count << " rows, loss only";
      EXPECT_EQ(difference(both(rows_of(c, rows)), all, tokens, rows), "")
          << count << " rows, with gradients";
    }
    for (size_t row = 0; row < tokens; row += tokens / 4 + 1) {
      EXPECT_EQ(difference(forward(rows_of(c, {row})), all, tokens, {row}), "") << "row " << row;
    }
  });
}

TEST_P(BatchInvariance, ManyRows) {
  const int64_t tokens = engine().is_reference() || is_slowed_down() ? 1024 : 8192;
  for (const logitless_dtype dtype : dtypes()) {
    const Case c = case_of(variants()[5], {tokens, 521, 24}, dtype);
    SCOPED_TRACE(describe(c));
    const auto count = static_cast<size_t>(tokens);
    const Outputs all = forward(c);
    const Rows order = shuffled_rows(count, 4);
    EXPECT_EQ(difference(both(rows_of(c, order)), all, count, order), "");
    for (const size_t few : {1, 7, 64, 65, 128}) {
      const Rows rows(order.end() - static_cast<std::ptrdiff_t>(few), order.end());
      EXPECT_EQ(difference(both(rows_of(c, rows)), all, count, rows), "") << few << " rows";
    }
  }
}

// A rollout's log-probabilities are those of the training pass, under every budget and in every plan.
TEST_P(BatchInvariance, RolloutEqualsTrainer) {
  for_each_case([&](const Case& c) { expect_same_in_every_plan(c, forward(c)); }, 150);
}

// Mixed operands are converted a window at a time, of a width that the budget sets.
TEST_P(BatchInvariance, MixedOperands) {
  for (const auto& [hidden, weight, compute] : {std::tuple{LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_F32},
                                                {LOGITLESS_F32, LOGITLESS_F32, LOGITLESS_BF16},
                                                {LOGITLESS_BF16, LOGITLESS_F32, LOGITLESS_BF16},
                                                {LOGITLESS_BF16, LOGITLESS_BF16, LOGITLESS_FP8},
                                                {LOGITLESS_F32, LOGITLESS_BF16, LOGITLESS_FP8}}) {
    PlainSize some = size(64);
    some.tokens = 150;
    Case c = case_of(variants()[4], some, LOGITLESS_BF16);  // all of the formats hold its values
    c.problem.dtype.hidden = c.problem.dtype.d_hidden = hidden;
    c.problem.dtype.weight = c.problem.dtype.d_weight = weight;
    c.problem.compute_dtype = compute;
    if (!engine().can_run(c.problem)) continue;
    SCOPED_TRACE(describe(c));
    const Outputs rollout = forward(c);
    expect_same_in_every_plan(c, rollout);
    const Rows few{3, 111, 74};
    EXPECT_EQ(difference(both(rows_of(c, few)), rollout, 150, few), "");
  }
}

// Without the option bits do depend on the batch with sm90. They may with portable, because cuBLASLt's
// algorithms may. On the host they never do.
TEST_P(BatchInvariance, WithoutIt) {
  for (const logitless_dtype dtype : dtypes()) {
    bool differs = false;
    for (const Variant& variant : variants()) {
      const Case c = case_of(variant, size(64), dtype, /*invariant=*/false);
      const auto tokens = static_cast<size_t>(c.problem.tokens);
      const Outputs all = forward(c);
      const Case mode_on = case_of(variant, size(64), dtype);
      if (!is_device()) {
        EXPECT_EQ(difference(forward(mode_on), all, tokens, first_rows(tokens)), "") << variant.name;
      }
      const Rows order = shuffled_rows(tokens, 3);
      for (const size_t count : {size_t{7}, tokens}) {
        const Rows rows(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count));
        differs = differs || !difference(both(rows_of(c, rows)), all, tokens, rows).empty();
      }
    }
    const bool may_differ = is_device();
    if (!may_differ || engine().engine == "sm90") {
      EXPECT_EQ(differs, may_differ) << static_cast<int>(dtype);
    }
  }
}

LOGITLESS_TEST_ON(BatchInvariance, engines());

}  // namespace
}  // namespace logitless_test
