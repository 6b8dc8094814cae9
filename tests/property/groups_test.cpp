// Ranks that hold shards of the vocabulary, of any sizes, find the loss and the gradients of the whole in one
// run each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "compare.h"
#include "formats.h"
#include "rank_group.h"
#include "row_fields.h"

namespace logitless_test {
namespace {

using Sizes = std::vector<int64_t>;

Sizes random_sizes(Random& random, int64_t total, int ranks) {
  Sizes sizes;
  for (int rank = 1; rank < ranks; ++rank) {
    sizes.push_back(random.chance(0.2) ? 0 : random.integer(0, total));
    total -= sizes.back();
  }
  sizes.insert(sizes.begin() + random.integer(0, ranks - 1), total);
  return sizes;
}

// Every rank's own problem.
std::vector<logitless::Problem> cut(const logitless::Problem& whole, const Sizes& sizes,
                                    logitless::GroupDHidden d_hidden) {
  std::vector<logitless::Problem> ranks;
  int64_t start = 0;
  for (int64_t size : sizes) {
    logitless::Problem p = whole;
    p.vocab = size;
    logitless::set_group(p, static_cast<int32_t>(sizes.size()), start, whole.vocab, std::ranges::max(sizes),
                         d_hidden);
    start += size;
    ranks.push_back(p);
  }
  return ranks;
}

void append(const std::vector<double>& from, std::vector<double>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

class Groups : public testing::TestWithParam<Engine> {
 protected:
  // The seed's random case as a group can run it. Sums of parts need parts in float32, in rows without gaps.
  // In the place of one that the engine cannot run comes another.
  Case grouped(uint64_t seed, const CaseLimits& limits) const {
    Case c = random_case(seed, limits);
    while (!GetParam().can_run(c.problem)) c = random_case(seed += 10'000, limits);
    if (seed % 3 == 1) {
      Random random(seed);
      give_targets(random, &c, random.pick<int64_t>({1, 2, 5, 64}), random.pick<double>({-1, 0, 0}), 1.5);
    }
    logitless::Problem& p = c.problem;
    p.accumulate.d_hidden = 0;
    c.d_hidden_start.clear();
    c.d_hidden_layout = {};
    if (p.dtype.hidden != LOGITLESS_F64) p.dtype.d_hidden = LOGITLESS_F32;
    return c;
  }

  // Groups take no float64 on a device.
  bool allows_fp64() const { return GetParam().has_float64() && !GetParam().is_device(); }

  // The outputs of one pass, which every rank runs at the same time. What is told of rows has the same bits
  // on all of them; gradients are put together.
  Outputs run_ranks(const Case& c, logitless::Pass pass, const Sizes& sizes, size_t budget,
                    const Outputs* known, bool only_losses = false) const {
    RankGroup group(static_cast<int>(sizes.size()), GetParam().is_device());
    logitless::Problem whole = pass_problem(c, pass);
    whole.max_workspace_bytes = budget;
    const auto ranks = static_cast<int64_t>(sizes.size());
    const bool scatters = whole.has.d_hidden != 0 && whole.tokens % ranks == 0 && c.seed % 2 == 0;
    const auto problems =
        cut(whole, sizes, scatters ? logitless::GroupDHidden::sum_of_own : logitless::GroupDHidden::sum);
    std::vector<Outputs> found(sizes.size());
    group.run([&](int rank, const logitless::Communicator& communicator) {
      found[static_cast<size_t>(rank)] =
          run_pass(context_, problems[static_cast<size_t>(rank)], c, known, &communicator, only_losses);
    });
    Outputs out = found[0];
    out.d_classifier.clear();
    out.d_bias.clear();
    const size_t own = out.d_hidden.size() / sizes.size();
    for (size_t rank = 0; rank < found.size(); ++rank) {
      append(found[rank].d_classifier, &out.d_classifier);
      append(found[rank].d_bias, &out.d_bias);
      if (scatters) {
        std::copy_n(found[rank].d_hidden.begin() + static_cast<std::ptrdiff_t>(rank * own), own,
                    out.d_hidden.begin() + static_cast<std::ptrdiff_t>(rank * own));
      }
    }
    for (Outputs& each : found) {
      each.d_classifier = out.d_classifier;
      each.d_bias = out.d_bias;
      if (scatters) each.d_hidden = out.d_hidden;
      EXPECT_STREQ(first_difference(found[0], each), "") << "between ranks";
    }
    return out;
  }

  Outputs solve_in_group(const Case& c, const Sizes& sizes, size_t budget) const {
    if (c.mode == Mode::kForwardBackward) {
      return run_ranks(c, logitless::Pass::forward_backward, sizes, budget, nullptr);
    }
    Outputs out = run_ranks(c, logitless::Pass::forward, sizes, budget, nullptr);
    if (c.mode == Mode::kForward) return out;
    Outputs gradients = run_ranks(c, logitless::Pass::backward, sizes, budget, &out);
    out.d_hidden = std::move(gradients.d_hidden);
    out.d_classifier = std::move(gradients.d_classifier);
    out.d_bias = std::move(gradients.d_bias);
    return out;
  }

  void expect_group_agrees(const Case& c, const Expected& expected, const Sizes& sizes,
                           size_t budget = 0) const {
    SCOPED_TRACE(testing::Message() << describe(c) << "\ncut into " << testing::PrintToString(sizes)
                                    << ", budget " << budget);
    // The merge rounds the statistics once more (on a device), as each rank's part of d_hidden is rounded.
    const double times = static_cast<double>(sizes.size() + 1);
    Bounds bounds = times * expected.bounds_of(GetParam());
    const double unit = stats_dtype(c.problem) == LOGITLESS_F64 ? 0x1p-53 : 0x1p-24;
    bounds.lse += times * unit;
    bounds.nll += times * unit;
    bounds.log_sum_sq_probs += 3 * times * unit;
    const Outputs first = solve_in_group(c, sizes, budget);
    expected.check(first, bounds);
    EXPECT_STREQ(first_difference(first, solve_in_group(c, sizes, budget)), "") << "between runs";
  }

  logitless::Context context_ = make_context(GetParam(), 2);
};

TEST_P(Groups, AnyCutOfSmallVocabulariesSlow) {
  for (uint64_t seed = 0; seed < (GetParam().is_device() ? 20 : seeds(120)); ++seed) {
    const Case c = grouped(seed, {.largest_dimension = 9, .allow_fp64 = allows_fp64()});
    Random random(seed);
    const Expected expected(c);
    expect_group_agrees(c, expected, random_sizes(random, c.problem.vocab, 1 + static_cast<int>(seed % 5)));
  }
}

TEST_P(Groups, LargerVocabulariesUnderBudgetsSlow) {
  for (uint64_t seed = 500; seed < 500 + (GetParam().is_device() ? 12 : seeds(40)); ++seed) {
    const Case c = grouped(seed, {.largest_dimension = 1500, .allow_fp64 = allows_fp64()});
    Random random(seed);
    const Expected expected(c);
    const Sizes sizes = random_sizes(random, c.problem.vocab, 2 + static_cast<int>(seed % 3));
    expect_group_agrees(c, expected, sizes);
    const auto pass =
        c.mode == Mode::kForwardBackward ? logitless::Pass::forward_backward : logitless::Pass::forward;
    std::set<size_t> budgets;
    for (const logitless::PlanInfo& plan :
         context_.plans(cut(pass_problem(c, pass), sizes, logitless::GroupDHidden::sum)[0])) {
      budgets.insert(plan.workspace_bytes);
    }
    for (size_t budget : budgets) {
      try {
        expect_group_agrees(c, expected, sizes, budget);
      } catch (const logitless::Error& error) {  // the backward pass may need more than the forward pass
        EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
      }
    }
  }
}

// Chunks of tokens, each with an exchange of its own; and the number of exchanges is the plan's.
TEST_P(Groups, ChunksOfTokensExchangeOnceEachSlow) {
  Case c = plain_case(7, {1200, 900, 24}, GetParam().plain_dtype());
  c.problem.dtype.d_hidden = stats_dtype(c.problem);
  c.targets[3] = c.problem.ignore_index;
  const Expected expected(c);
  const Sizes sizes{500, 0, 400};
  const auto problems =
      cut(pass_problem(c, logitless::Pass::forward_backward), sizes, logitless::GroupDHidden::sum);
  std::set<int64_t> chunks;
  for (const logitless::PlanInfo& listed : context_.plans(problems[0])) {
    SCOPED_TRACE(listed.config);
    std::vector<logitless::PlanInfo> plans;
    for (logitless::Problem p : problems) {
      p.max_workspace_bytes = listed.workspace_bytes;
      plans.push_back(logitless::Plan(context_, p).info());
    }
    for (const logitless::PlanInfo& plan : plans) {
      EXPECT_EQ(plan.token_chunk, plans[0].token_chunk);
      EXPECT_EQ(plan.gathers, plans[0].gathers);
      EXPECT_EQ(plan.gathered_bytes, plans[0].gathered_bytes);
      EXPECT_EQ(plan.reduced_bytes,
                static_cast<size_t>(1200 * 24) * size_of(as_dtype(c.problem.dtype.d_hidden)));
    }
    chunks.insert(plans[0].gathers);
    expect_group_agrees(c, expected, sizes, listed.workspace_bytes);
    RankGroup group(3, GetParam().is_device());
    group.run([&](int rank, const logitless::Communicator& communicator) {
      logitless::Problem p = problems[static_cast<size_t>(rank)];
      p.max_workspace_bytes = listed.workspace_bytes;
      run_pass(context_, p, c, nullptr, &communicator);
    });
    EXPECT_EQ(group.calls(), plans[0].gathers + 1);  // and the sum of d_hidden
  }
  if (GetParam().backend != "reference") {
    EXPECT_GT(chunks.size(), 1u);
  }
}

// Equal logits on several ranks, of which the smallest ids come first; shards of fewer columns than k, and
// one so small that a device's sample of it has too few groups.
TEST_P(Groups, LargestLogitsOfAllShards) {
  for (const auto& [sizes, k] : {std::pair<Sizes, int64_t>{{7, 0, 30, 1, 2}, 40},
                                 {{3000, 10'000, 500}, 64},
                                 {{500, 400}, 1},
                                 {{0, 900}, 5},
                                 {{15'000, 15'011}, 8}}) {
    const int64_t vocab = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    Case c = plain_case(static_cast<uint64_t>(k), {33, vocab, 16}, GetParam().plain_dtype());
    c.mode = Mode::kForward;
    c.problem.has.bias = c.problem.has.d_hidden = c.problem.has.d_classifier = c.problem.has.d_bias = 0;
    c.bias.clear();
    c.problem.has.argmax = 1;
    c.problem.top_k = k;
    c.targets[5] = c.problem.ignore_index;
    expect_group_agrees(c, Expected(c), sizes);
    // Sums of these products are exact, so that equal columns have equal logits in every kernel of a library.
    for (double& x : c.hidden) x = std::nearbyint(64 * x) / 64;
    for (double& x : c.classifier) x = std::nearbyint(64 * x) / 64;
    for (size_t j = 10 * 16; j < c.classifier.size(); ++j) c.classifier[j] = c.classifier[j - 10 * 16];
    const Outputs got = run_ranks(c, logitless::Pass::forward, sizes, 0, nullptr);
    for (size_t row = 0; row < 33; ++row) {
      if (row == 5) continue;
      EXPECT_EQ(got.top_ids[row * static_cast<size_t>(k)], got.argmax[row]);
      for (size_t r = 0; r < std::min<size_t>(static_cast<size_t>(k), static_cast<size_t>(vocab / 10)); ++r) {
        EXPECT_EQ(got.top_ids[row * static_cast<size_t>(k) + r],
                  std::fmod(got.argmax[row], 10) + 10 * static_cast<double>(r));
      }
    }
  }
}

// NaN before infinity before numbers, and masked columns last, by the first ids.
TEST_P(Groups, LargestLogitsThatAreNoNumbers) {
  Case c = plain_case(3, {4, 60, 8}, GetParam().plain_dtype());
  c.mode = Mode::kForward;
  c.problem.has.d_hidden = c.problem.has.d_classifier = c.problem.has.d_bias = 0;
  c.problem.top_k = 60;
  c.problem.dtype.bias = LOGITLESS_F32;
  std::fill(c.hidden.begin(), c.hidden.end(), 0.0);
  for (size_t j = 0; j < 60; ++j) c.bias[j] = static_cast<double>((j * 17) % 60) / 8;
  c.bias[50] = c.bias[20] = NAN;
  c.bias[7] = c.bias[41] = INFINITY;
  c.bias[3] = c.bias[59] = -INFINITY;
  std::vector<double> expected(60);
  std::iota(expected.begin(), expected.end(), 0.0);
  std::ranges::stable_sort(expected, [&](double a, double b) {
    const double x = c.bias[static_cast<size_t>(a)], y = c.bias[static_cast<size_t>(b)];
    return std::isnan(x) ? !std::isnan(y) : x > y;
  });
  const Outputs got = run_ranks(c, logitless::Pass::forward, {10, 0, 35, 15}, 0, nullptr);
  for (std::ptrdiff_t row = 0; row < 4; ++row) {
    EXPECT_EQ(std::vector<double>(got.top_ids.begin() + 60 * row, got.top_ids.begin() + 60 * (row + 1)),
              expected);
  }
}

// For one cut of the vocabulary a row has the same bits in any batch, place, plan and pass, and whatever is
// told of it.
TEST_P(Groups, BatchInvariantRowsSlow) {
  const int64_t vocab = GetParam().is_device() ? 4000 : 1100;
  Case c = plain_case(12, {260, vocab, 24}, GetParam().plain_dtype());
  c.problem.batch_invariant = 1;
  c.problem.reduction = LOGITLESS_REDUCTION_NONE;
  c.problem.dtype.d_hidden = stats_dtype(c.problem);
  for (size_t row = 0; row < 260; row += 37) {  // exps relative to their targets leave the range of fp32
    for (size_t k = 0; k < 24; ++k) c.hidden[24 * row + k] *= 64;
  }
  c.targets[7] = c.problem.ignore_index;
  const Sizes sizes{vocab / 2 + 13, 0, vocab / 2 - 13};
  const Outputs all = run_ranks(c, logitless::Pass::forward, sizes, 0, nullptr);
  const auto rows_of = [&](const std::vector<double>& values, size_t first, size_t count) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
    return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(count));
  };
  for (const auto& [first, count] : {std::pair<size_t, size_t>{0, 260}, {37, 1}, {5, 7}, {74, 128}}) {
    Case some = c;
    some.problem.tokens = static_cast<int64_t>(count);
    some.hidden = rows_of(c.hidden, 24 * first, 24 * count);
    some.targets.assign(c.targets.begin() + static_cast<std::ptrdiff_t>(first),
                        c.targets.begin() + static_cast<std::ptrdiff_t>(first + count));
    const auto expect_same = [&](const Outputs& got, const char* what) {
      SCOPED_TRACE(testing::Message() << what << ", rows " << first << " and " << count - 1 << " more");
      for (const auto member : {&Outputs::lse, &Outputs::lse_low, &Outputs::loss}) {
        EXPECT_TRUE(same_bits(got.*member, rows_of(all.*member, first, count)));
      }
    };
    for (const logitless::Pass pass : {logitless::Pass::forward, logitless::Pass::forward_backward}) {
      std::set<size_t> budgets{0};
      for (const logitless::PlanInfo& plan :
           context_.plans(cut(pass_problem(some, pass), sizes, logitless::GroupDHidden::sum)[0])) {
        budgets.insert(plan.workspace_bytes);
      }
      for (const size_t budget : budgets) {
        SCOPED_TRACE(budget);
        expect_same(run_ranks(some, pass, sizes, budget, nullptr), "all that is told");
        expect_same(run_ranks(some, pass, sizes, budget, nullptr, true), "losses alone");
      }
    }
  }
}

TEST_P(Groups, GroupOfOneIsThePlainRun) {
  Case c = plain_case(9, {40, 700, 16}, GetParam().plain_dtype());
  c.problem.dtype.d_hidden = stats_dtype(c.problem);
  const Outputs plain = solve(context_, c);
  EXPECT_STREQ(first_difference(plain, solve_in_group(c, {700}, 0)), "");
}

TEST_P(Groups, LogProbabilitiesNeedAnAllReduce) {
  Case c = plain_case(10, {8, 30, 4}, GetParam().plain_dtype());
  Random random(1);
  give_targets(random, &c, 3, 0, 1);
  RankGroup group(2, GetParam().is_device());
  const auto problems =
      cut(pass_problem(c, logitless::Pass::forward), {10, 20}, logitless::GroupDHidden::part);
  try {
    group.run([&](int rank, const logitless::Communicator& given) {
      logitless::Communicator communicator = given;
      communicator.all_reduce = nullptr;
      run_pass(context_, problems[static_cast<size_t>(rank)], c, nullptr, &communicator);
    });
    FAIL() << "nothing was thrown";
  } catch (const logitless::Error& error) {
    EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_STREQ(
        error.what(),
        "communicator.all_reduce: expected a function, as each rank has some of target_log_probs, got null");
  }
}

TEST_P(Groups, RanksWhoseCollectivesFailSaySo) {
  const Case c = plain_case(11, {8, 30, 4}, GetParam().plain_dtype());
  RankGroup group(2, GetParam().is_device());
  const auto problems =
      cut(pass_problem(c, logitless::Pass::forward_backward), {10, 20}, logitless::GroupDHidden::part);
  try {
    group.run([&](int rank, const logitless::Communicator& communicator) {
      if (rank == 1) throw logitless::Error(LOGITLESS_COMMUNICATION_FAILED, "rank 1 is gone");
      run_pass(context_, problems[0], c, nullptr, &communicator);
    });
    FAIL() << "nothing was thrown";
  } catch (const logitless::Error& error) {
    EXPECT_EQ(error.status(), LOGITLESS_COMMUNICATION_FAILED);
    EXPECT_STREQ(error.what(), "communicator.all_gather: expected it to return 0, got 1");
  }
}

// Each rank tells sums of differences from its own maximum: what all logits have in common changes no loss.
TEST_P(Groups, ACommonOffsetOfAllLogits) {
  if (GetParam().is_device()) GTEST_SKIP() << "sums of w z are float32 there";
  struct Logits {
    logitless_dtype dtype;
    double step, offset;
  };
  for (const Logits& logits :
       {Logits{LOGITLESS_F32, 0, 0x1p50}, {LOGITLESS_F64, 0x1p-3, -0x1p45}, {LOGITLESS_F64, 0, 1e15}}) {
    Case c = plain_case(5, {6, 90, 4}, logits.dtype);
    if (!GetParam().can_run(c.problem)) continue;
    c.mode = Mode::kForward;
    c.problem.has.entropy = c.problem.has.bias = c.problem.has.class_weight = 1;
    c.problem.label_smoothing = 0.4;
    std::fill(c.classifier.begin(), c.classifier.end(), 0);
    c.bias.resize(90);
    for (int64_t j = 0; j < 90; ++j) {
      c.bias[static_cast<size_t>(j)] = logits.step * static_cast<double>(j * j % 67);
      c.class_weight.push_back(0.25 * static_cast<double>(j % 7));
    }
    const Expected expected(c);
    const Bounds bounds = expected.bounds_of(GetParam());
    for (double& b : c.bias) b += logits.offset;
    for (const Sizes& sizes : {Sizes{90}, Sizes{45, 45}, Sizes{7, 0, 50, 33}}) {
      SCOPED_TRACE(testing::Message() << "offset " << logits.offset << ", " << testing::PrintToString(sizes));
      const Outputs got = solve_in_group(c, sizes, 0);
      const logitless_dtype stats = stats_dtype(c.problem);
      EXPECT_TRUE(close("loss", got.loss, expected.truth().loss, bounds.loss, stats));
      EXPECT_TRUE(close("entropy", got.entropy, expected.truth().entropy, bounds.entropy, stats));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, Groups, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
