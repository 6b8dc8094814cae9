// Ranks that hold shards of the vocabulary, of any sizes, find the loss and the gradients of the whole in one
// run each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include "formats.h"
#include "groups_fixture.h"

namespace logitless_test {
namespace {

Sizes random_sizes(Random& random, int64_t total, int ranks) {
  Sizes sizes;
  for (int rank = 1; rank < ranks; ++rank) {
    sizes.push_back(random.chance(0.2) ? 0 : random.integer(0, total));
    total -= sizes.back();
  }
  sizes.insert(sizes.begin() + random.integer(0, ranks - 1), total);
  return sizes;
}

class Groups : public GroupTest {
 protected:
  // The seed's random case as a group can run it. Sums of parts need parts in float32, in rows without gaps.
  // Another seed replaces a case that the engine cannot run.
  Case grouped(uint64_t seed, const CaseLimits& limits) const {
    Case c = random_case(seed, limits);
    while (!engine().can_run(c.problem)) c = random_case(seed += 10'000, limits);
    if (c.mode == Mode::kForwardThenBackward && seed % 2 == 0) c = saving(c);
    if (seed % 3 == 1) {
      Random random(seed);
      give_targets(random, &c, random.pick<int64_t>({1, 2, 5, 64}), random.pick<double>({-1, 0, 0}), 1.5);
    }
    logitless::Problem& p = c.problem;
    if (seed % 5 == 2 && p.targets_per_row == 0 && p.dtype.hidden != LOGITLESS_F64) {
      p.compute_dtype = LOGITLESS_FP8;
      p.top_k = 0;
    }
    p.accumulate.d_hidden = 0;
    c.d_hidden_start.clear();
    c.d_hidden_layout = {};
    if (p.dtype.hidden != LOGITLESS_F64) p.dtype.d_hidden = LOGITLESS_F32;
    return c;
  }

  // Groups take no float64 on a device.
  bool allows_fp64() const { return engine().has_float64() && !is_device(); }

  void expect_group_agrees(const Case& c, const Expected& expected, const Sizes& sizes,
                           size_t budget = 0) const {
    SCOPED_TRACE(testing::Message() << describe(c) << "\ncut into " << testing::PrintToString(sizes)
                                    << ", budget " << budget);
    const Outputs first = solve_in_group(c, sizes, budget);
    expected.check(first, joined_bounds(c, expected, sizes.size()));
    EXPECT_STREQ(first_difference(first, solve_in_group(c, sizes, budget)), "") << "between runs";
  }

  // Returns the error of a run of two ranks.
  logitless::Error error_of(const logitless::Problem& whole,
                            const std::function<void(int, logitless::Communicator&)>& change,
                            const Case& c) const {
    RankGroup group(2, is_device());
    const auto problems = cut(whole, {10, 20}, logitless::GroupDHidden::part);
    return refusal([&] {
      group.run([&](int rank, const logitless::Communicator& given) {
        logitless::Communicator communicator = given;
        change(rank, communicator);
        run_pass(context_, problems[static_cast<size_t>(rank)], c, nullptr, &communicator);
      });
    });
  }
};

TEST_P(Groups, AnyCutOfSmallVocabulariesSlow) {
  for (uint64_t seed = 0; seed < seeds(is_device() ? 20 : 120); ++seed) {
    const Case c = grouped(seed, {.largest_dimension = 9, .allow_fp64 = allows_fp64()});
    Random random(seed);
    const Expected expected(c);
    expect_group_agrees(c, expected, random_sizes(random, c.problem.vocab, 1 + static_cast<int>(seed % 5)));
  }
}

TEST_P(Groups, LargerVocabulariesUnderBudgetsSlow) {
  for (uint64_t seed = 500; seed < 500 + seeds(is_device() ? 12 : 40); ++seed) {
    const Case c = grouped(seed, {.largest_dimension = 1500, .allow_fp64 = allows_fp64()});
    Random random(seed);
    const Expected expected(c);
    const Sizes sizes = random_sizes(random, c.problem.vocab, 2 + static_cast<int>(seed % 3));
    expect_group_agrees(c, expected, sizes);
    const auto pass =
        c.mode == Mode::kForwardBackward ? logitless::Pass::forward_backward : logitless::Pass::forward;
    logitless::Problem first = cut(pass_problem(c, pass), sizes)[0];
    if (first.saved_bytes != 0) first.saved_bytes = saved_bytes_of(c, sizes, 0);
    const auto budgets = plan_bytes(first);
    for (size_t budget : budgets) {
      try {
        expect_group_agrees(c, expected, sizes, budget);
      } catch (const logitless::Error& error) {  // the backward pass may need more than the forward pass
        EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
      }
    }
  }
}

// Each chunk of tokens has an exchange of its own, and the plan counts the exchanges.
TEST_P(Groups, ChunksOfTokensExchangeOnceEachSlow) {
  Case c = plain(7, {1200, 900, 24});
  c.problem.dtype.d_hidden = stats_dtype(c.problem);
  c.targets[3] = c.problem.ignore_index;
  const Expected expected(c);
  const Sizes sizes{500, 0, 400};
  const auto problems = cut(pass_problem(c, logitless::Pass::forward_backward), sizes);
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
    run_ranks(c, logitless::Pass::forward_backward, sizes, listed.workspace_bytes);
    EXPECT_EQ(calls_, plans[0].gathers + 1);  // and the sum of d_hidden
  }
  if (engine().backend != "reference") {
    EXPECT_GT(chunks.size(), 1u);
  }
}

// Several ranks have equal logits, of which the smallest ids come first. Some shards have fewer columns than
// k. One is so small that a device's sample of it has too few groups.
TEST_P(Groups, LargestLogitsOfAllShards) {
  for (const auto& [sizes, k] : {std::pair<Sizes, int64_t>{{7, 0, 30, 1, 2}, 40},
                                 {{3000, 10'000, 500}, 64},
                                 {{500, 400}, 1},
                                 {{0, 900}, 5},
                                 {{15'000, 15'011}, 8}}) {
    const int64_t vocab = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    Case c = plain_case(static_cast<uint64_t>(k), {33, vocab, 16}, engine().plain_dtype());
    c.mode = Mode::kForward;
    remove_bias(&c);
    c.problem.has.argmax = 1;
    c.problem.top_k = k;
    c.targets[5] = c.problem.ignore_index;
    expect_group_agrees(c, Expected(c), sizes);
    // Sums of these products are exact, so that equal columns have equal logits in every kernel of a library.
    for (double& x : c.hidden) x = std::nearbyint(64 * x) / 64;
    for (double& x : c.weight) x = std::nearbyint(64 * x) / 64;
    for (size_t j = 10 * 16; j < c.weight.size(); ++j) c.weight[j] = c.weight[j - 10 * 16];
    const Outputs got = run_ranks(c, logitless::Pass::forward, sizes);
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

// NaN comes before infinity before numbers, and masked columns come last, by the first ids.
TEST_P(Groups, LargestLogitsThatAreNoNumbers) {
  Case c = plain(3, {4, 60, 8});
  c.mode = Mode::kForward;
  c.problem.top_k = 60;
  c.problem.dtype.bias = LOGITLESS_F32;
  std::fill(c.hidden.begin(), c.hidden.end(), 0.0);
  for (size_t j = 0; j < 60; ++j) c.bias[j] = static_cast<double>((j * 17) % 60) / 8;
  c.bias[50] = c.bias[20] = NAN;
  c.bias[7] = c.bias[41] = INFINITY;
  c.bias[3] = c.bias[59] = -INFINITY;
  const std::vector<double> expected = largest_ids(c.bias, 60);
  const Outputs got = run_ranks(c, logitless::Pass::forward, {10, 0, 35, 15});
  for (size_t row = 0; row < 4; ++row) EXPECT_EQ(rows_of(got.top_ids, 4, {row}), expected);
}

// For one cut of the vocabulary a row has the same bits in any batch, place, plan and pass, whatever its
// outputs are.
TEST_P(Groups, BatchInvariantRowsSlow) {
  const int64_t vocab = is_device() ? 4000 : 1100;
  Case c = plain(12, {260, vocab, 24});
  c.problem.batch_invariant = 1;
  c.problem.reduction = LOGITLESS_REDUCTION_NONE;
  c.problem.dtype.d_hidden = stats_dtype(c.problem);
  for (size_t row = 0; row < 260; row += 37) {  // exp logits relative to the targets leave the range of fp32
    for (size_t k = 0; k < 24; ++k) c.hidden[24 * row + k] *= 64;
  }
  c.targets[7] = c.problem.ignore_index;
  const Sizes sizes{vocab / 2 + 13, 0, vocab / 2 - 13};
  const Outputs all = run_ranks(c, logitless::Pass::forward, sizes);
  for (const auto& [first, count] : {std::pair<size_t, size_t>{0, 260}, {37, 1}, {5, 7}, {74, 128}}) {
    std::vector<size_t> rows(count);
    std::iota(rows.begin(), rows.end(), first);
    const Case some = rows_of(c, rows);
    const auto expect_same = [&](const Outputs& got, const char* what) {
      SCOPED_TRACE(testing::Message()
                   << what << ", rows " << rows[0] << " and " << rows.size() - 1 << " more");
      for (const auto member : {&Outputs::lse, &Outputs::lse_residual, &Outputs::loss}) {
        EXPECT_TRUE(same_bits(got.*member, rows_of(all.*member, 260, rows)));
      }
    };
    for (const logitless::Pass pass : {logitless::Pass::forward, logitless::Pass::forward_backward}) {
      std::set<size_t> budgets = plan_bytes(cut(pass_problem(some, pass), sizes)[0]);
      budgets.insert(0);
      for (const size_t budget : budgets) {
        SCOPED_TRACE(budget);
        expect_same(run_ranks(some, pass, sizes, budget, nullptr), "all outputs");
        expect_same(run_ranks(some, pass, sizes, budget, nullptr, true), "losses alone");
      }
    }
  }
}

TEST_P(Groups, GroupOfOneIsThePlainRun) {
  Case c = plain(9, {40, 700, 16});
  c.problem.dtype.d_hidden = stats_dtype(c.problem);
  const Outputs plain = solve(c);
  EXPECT_STREQ(first_difference(plain, solve_in_group(c, {700}, 0)), "");
}

TEST_P(Groups, LogProbabilitiesNeedAnAllReduce) {
  Case c = plain(10, {8, 30, 4});
  Random random(1);
  give_targets(random, &c, 3, 0, 1);
  const logitless::Error error = error_of(
      pass_problem(c, logitless::Pass::forward),
      [](int, logitless::Communicator& communicator) { communicator.all_reduce = nullptr; }, c);
  EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_STREQ(
      error.what(),
      "communicator.all_reduce: expected a function (each rank has some of target_log_probs), got null");
}

TEST_P(Groups, RanksWhoseCollectivesFailSaySo) {
  const Case c = plain(11, {8, 30, 4});
  const logitless::Error error = error_of(
      pass_problem(c, logitless::Pass::forward_backward),
      [](int rank, logitless::Communicator&) {
        if (rank == 1) throw logitless::Error(LOGITLESS_COMMUNICATION_FAILED, "rank 1 is gone");
      },
      c);
  EXPECT_EQ(error.status(), LOGITLESS_COMMUNICATION_FAILED);
  EXPECT_STREQ(error.what(), "communicator.all_gather: expected it to return 0, got 1");
}

// Each rank gives sums of differences from its own maximum, so an offset of all logits changes no loss.
TEST_P(Groups, ACommonOffsetOfAllLogits) {
  if (is_device()) GTEST_SKIP() << "sums of w z are float32 there";
  struct Logits {
    logitless_dtype dtype;
    double step, offset;
  };
  for (const Logits& logits :
       {Logits{LOGITLESS_F32, 0, 0x1p50}, {LOGITLESS_F64, 0x1p-3, -0x1p45}, {LOGITLESS_F64, 0, 1e15}}) {
    Case c = plain_case(5, {6, 90, 4}, logits.dtype);
    if (!engine().can_run(c.problem)) continue;
    c.mode = Mode::kForward;
    c.problem.has.entropy = c.problem.has.bias = c.problem.has.class_weight = 1;
    c.problem.label_smoothing = 0.4;
    std::fill(c.weight.begin(), c.weight.end(), 0);
    c.bias.resize(90);
    for (int64_t j = 0; j < 90; ++j) {
      c.bias[static_cast<size_t>(j)] = logits.step * static_cast<double>(j * j % 67);
      c.class_weight.push_back(0.25 * static_cast<double>(j % 7));
    }
    const Expected expected(c);
    const Bounds bounds = expected.bounds_of(engine());
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

// A rank without a row's target keeps exp logits relative to 0, and one with it relative to a logit far below
// lse. The sums of all ranks leave the range of a single one's.
TEST_P(Groups, LogitsFarAboveTheirOffsets) {
  for (const logitless_dtype dtype : engine().kept_dtypes()) {
    Case c = plain_case(14, {40, 450, 16}, dtype);
    c.problem.dtype.bias = c.problem.dtype.d_bias = LOGITLESS_F32;
    for (const double above : {75.0, 84.0}) {
      for (size_t j = 0; j < c.bias.size(); ++j) c.bias[j] = j < 30 ? 0 : above;
      for (size_t i = 0; i < c.targets.size(); ++i)
        c.targets[i] = static_cast<int64_t>(i) * (i % 2 == 0 ? 10 : 1) % 450;
      for (const Case& each : {c, saving(c)}) {
        const Expected expected(each);
        for (const Sizes& sizes : {Sizes{450}, Sizes{200, 250}, Sizes{30, 0, 420}})
          expect_group_agrees(each, expected, sizes);
      }
    }
  }
}

LOGITLESS_TEST_ON(Groups, engines());

}  // namespace
}  // namespace logitless_test
