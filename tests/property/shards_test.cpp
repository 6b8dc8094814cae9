// A vocabulary cut into shards, in every way, gives the loss and the gradients of the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "engine_test.h"

namespace logitless_test {
namespace {

enum class Join { kForwards, kBackwards, kPairs, kIntoTheLast, kRebaseAndSum };

// Joins the shards' statistics into the first.
void join(const logitless::Problem& whole, const logitless::Plan& plan, const Case& c,
          std::vector<std::unique_ptr<RunTensors>>* shards, Join how) {
  auto& s = *shards;
  const auto merge = [&](size_t from, size_t into) {
    logitless::merge_row_stats(plan, s[from]->buffers(), s[into]->buffers());
  };
  switch (how) {
    case Join::kForwards:
      for (size_t i = 1; i < s.size(); ++i) merge(i, 0);
      return;
    case Join::kBackwards:
      for (size_t i = s.size() - 1; i > 0; --i) merge(i, i - 1);
      return;
    case Join::kPairs:
      for (size_t step = 1; step < s.size(); step *= 2) {
        for (size_t i = 0; i + step < s.size(); i += 2 * step) merge(i + step, i);
      }
      return;
    case Join::kIntoTheLast:
      for (size_t i = 0; i + 1 < s.size(); ++i) merge(i, i + 1);
      std::swap(s.front(), s.back());
      return;
    case Join::kRebaseAndSum: {
      // The results of an all-reduce of maxima, and of one of the ids that reach them.
      Outputs top = s[0]->read();
      for (const auto& shard : s) {
        const Outputs one = shard->read();
        for (size_t i = 0; i < top.max.size(); ++i) {
          if (one.max[i] <= top.max[i]) continue;
          top.max[i] = one.max[i];
          if (whole.has.argmax) top.argmax[i] = one.argmax[i];
        }
      }
      Tensor new_max(stats_dtype(whole), whole.tokens, 1);
      new_max.fill(top.max);
      Outputs sums = top;
      for (size_t shard = 0; shard < s.size(); ++shard) {
        logitless::rebase_row_stats(plan, s[shard]->buffers(), new_max.data());
        const Outputs one = s[shard]->read();
        for (const ListedTensor& each : kTensors) {
          if (!each.is_merged() || each.values == &Outputs::max || each.values == &Outputs::argmax) continue;
          for (size_t i = 0; i < (one.*each.values).size(); ++i) {
            (sums.*each.values)[i] = (shard == 0 ? 0 : (sums.*each.values)[i]) + (one.*each.values)[i];
          }
        }
      }
      s[0] = std::make_unique<RunTensors>(whole, c);
      s[0]->add_inputs();
      s[0]->add_statistics(sums);
      return;
    }
  }
}

std::vector<logitless::Problem> cut(const logitless::Problem& whole, const std::vector<int64_t>& sizes) {
  std::vector<logitless::Problem> shards;
  int64_t start = 0;
  for (int64_t size : sizes) {
    logitless::Problem shard = whole;
    shard.vocab_start = start;
    shard.vocab = size;
    shard.vocab_total = whole.vocab;
    start += size;
    shards.push_back(shard);
  }
  return shards;
}

Outputs solve_in_shards(const logitless::Context& context, const Case& c, const std::vector<int64_t>& sizes,
                        Join how) {
  std::vector<std::unique_ptr<RunTensors>> stats;
  const logitless::Problem whole = pass_problem(c, logitless::Pass::forward);
  std::vector<double> valid_count;
  for (const logitless::Problem& shard : cut(whole, sizes)) {
    const Outputs one = run_pass(context, shard, c);
    valid_count = one.valid_count;
    stats.push_back(std::make_unique<RunTensors>(whole, c));
    stats.back()->add_inputs();
    stats.back()->add_statistics(one);
  }
  const logitless::Plan plan(context, whole);
  join(whole, plan, c, &stats, how);
  stats[0]->add_losses();
  logitless::loss_from_row_stats(plan, stats[0]->buffers());
  Outputs out = stats[0]->read();
  out.valid_count = valid_count;
  if (c.seed % 2 == 0) out.lse_residual.clear();  // as from a caller that does not keep it
  if (c.mode == Mode::kForward) return out;
  for (const logitless::Problem& shard : cut(pass_problem(c, logitless::Pass::backward), sizes)) {
    const Outputs one = run_pass(context, shard, c, &out);
    if (out.d_hidden.empty()) out.d_hidden.assign(one.d_hidden.size(), 0);
    for (size_t i = 0; i < one.d_hidden.size(); ++i) out.d_hidden[i] += one.d_hidden[i];
    out.d_weight.insert(out.d_weight.end(), one.d_weight.begin(), one.d_weight.end());
    out.d_bias.insert(out.d_bias.end(), one.d_bias.begin(), one.d_bias.end());
  }
  return out;
}

// Calls back with every way to write total as an ordered sum of positive sizes.
void for_every_cut(int64_t total, const std::function<void(const std::vector<int64_t>&)>& use) {
  for (uint64_t bars = 0; bars < uint64_t{1} << (total - 1); ++bars) {
    std::vector<int64_t> sizes{1};
    for (int64_t j = 1; j < total; ++j) {
      if ((bars >> (j - 1)) & 1)
        sizes.push_back(1);
      else
        ++sizes.back();
    }
    use(sizes);
  }
}

class Shards : public EngineTest {
 protected:
  // The seed's random case as shards can run it: forward, then backward. A sum of parts needs parts in
  // float32. Another seed replaces a case that the engine cannot run.
  Case shardable(uint64_t seed, const CaseLimits& limits) const {
    Case c = random_case(seed, limits);
    while (!engine().can_run(c.problem)) c = random_case(seed += 10'000, limits);
    c.problem.top_k = 0;  // shards have none
    if (c.mode == Mode::kForwardBackward) c.mode = Mode::kForwardThenBackward;
    logitless::Problem& p = c.problem;
    if (seed % 5 == 2 && p.dtype.hidden != LOGITLESS_F64) p.compute_dtype = LOGITLESS_FP8;
    p.accumulate.d_hidden = 0;
    c.d_hidden_start.clear();
    if (p.dtype.hidden != LOGITLESS_F64) p.dtype.d_hidden = LOGITLESS_F32;
    if (p.reduction == LOGITLESS_REDUCTION_NONE && c.grad_loss.empty()) {
      c.grad_loss.assign(static_cast<size_t>(p.tokens), 1);
    }
    return c;
  }

  void expect_shards_agree(const Case& c, const Expected& expected, const std::vector<int64_t>& sizes,
                           Join how) {
    SCOPED_TRACE(testing::Message() << "cut into " << testing::PrintToString(sizes) << ", joined by "
                                    << static_cast<int>(how));
    expected.check(solve_in_shards(context_, c, sizes, how), joined_bounds(c, expected, sizes.size()));
  }
};

constexpr Join kJoins[] = {Join::kForwards, Join::kBackwards, Join::kPairs, Join::kIntoTheLast,
                           Join::kRebaseAndSum};

TEST_P(Shards, EveryCutOfSmallVocabularies) {
  for (uint64_t seed = 0; seed < seeds(is_device() ? 12 : 60); ++seed) {
    const Case c = shardable(seed, {.largest_dimension = 7, .allow_fp64 = engine().has_float64()});
    const Expected expected(c);
    const Join how = kJoins[seed % std::size(kJoins)];
    for_every_cut(c.problem.vocab, [&](const auto& sizes) { expect_shards_agree(c, expected, sizes, how); });
  }
}

TEST_P(Shards, RandomCutsOfLargerVocabularies) {
  for (uint64_t seed = 500; seed < 500 + seeds(is_device() ? 12 : 30); ++seed) {
    const Case c = shardable(seed, {.largest_dimension = 700, .allow_fp64 = engine().has_float64()});
    const Expected expected(c);
    Random random(seed);
    std::vector<int64_t> sizes;
    int64_t left = c.problem.vocab;
    while (left > 0) {
      sizes.push_back(random.integer(1, left));
      left -= sizes.back();
    }
    for (Join how : kJoins) expect_shards_agree(c, expected, sizes, how);
  }
}

// Equal logits, of which the first is the argmax; a NaN, which no merge loses; masked columns, which do not
// change the maximum of the others. All results are those of one run over the whole vocabulary.
TEST_P(Shards, EqualMaskedAndNaNLogits) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(),
                   kNaN = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> all_logits[] = {{2, 1, 2, 2, 0, -1},
                                            {1, kNaN, 5, kNaN, 0, 7},
                                            {-kInfinity, -kInfinity, 3, 1, -kInfinity, 3},
                                            std::vector<double>(6, -kInfinity),
                                            {1, kInfinity, 2, 3, kInfinity, 0},
                                            {kNaN, kInfinity, -kInfinity, 0, 1, 2}};
  for (const std::vector<double>& logits : all_logits) {
    Case c = plain(1, {3, 6, 2});
    c.mode = Mode::kForward;
    c.problem.has.argmax = c.problem.has.entropy = c.problem.has.mean_logit = 1;
    c.problem.reduction = LOGITLESS_REDUCTION_NONE;
    c.targets = {0, 3, 5};
    std::fill(c.hidden.begin(), c.hidden.end(), 0);
    c.bias = logits;
    const Outputs whole = solve(c);
    for (const Join how : {Join::kForwards, Join::kBackwards, Join::kPairs, Join::kIntoTheLast}) {
      if (is_device() && how != Join::kPairs) continue;  // the host joins them
      for_every_cut(6, [&](const std::vector<int64_t>& sizes) {
        SCOPED_TRACE(testing::Message()
                     << testing::PrintToString(logits) << " cut into " << testing::PrintToString(sizes)
                     << ", joined by " << static_cast<int>(how));
        const Outputs got = solve_in_shards(context_, c, sizes, how);
        EXPECT_EQ(got.argmax, whole.argmax);
        EXPECT_EQ(got.is_top1, whole.is_top1);
        EXPECT_EQ(got.correct_count, whole.correct_count);
        for (const auto member : {&Outputs::max_logit, &Outputs::mean_logit, &Outputs::lse, &Outputs::nll,
                                  &Outputs::entropy, &Outputs::loss}) {
          EXPECT_TRUE(close("a statistic", got.*member, whole.*member, 0x1p-20, LOGITLESS_F32));
        }
      });
    }
  }
}

LOGITLESS_TEST_ON(Shards, engines());

}  // namespace
}  // namespace logitless_test
