// Ranks whose shards make no vocabulary, or that have other targets or ignored rows: on the host all say so
// by the same error, on a device they find NaN. They run as before when they agree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "engine_test.h"
#include "random.h"
#include "rank_group.h"

namespace logitless_test {
namespace {

class GroupCuts : public EngineTest {
 protected:
  static constexpr int kRanks = 3;

  GroupCuts() { context_ = make_context(engine(), 1); }
  void SetUp() override { set({20, 30, 8}, {12, 8, 10}); }

  void set(PlainSize size, const std::vector<int64_t>& shards) {
    case_ = plain(11, size);
    case_.problem.dtype.d_hidden = stats_dtype(case_.problem);
    case_.targets[0] = 5;
    case_.targets[1] = 17;
    problems_.clear();
    int64_t start = 0;
    for (int64_t vocab : shards) {
      logitless::Problem p = pass_problem(case_, logitless::Pass::forward_backward);
      p.vocab = vocab;
      logitless::set_group(p, kRanks, start, size.vocab, shards[0], logitless::GroupDHidden::sum);
      problems_.push_back(p);
      start += vocab;
    }
  }

  // The ranks' errors, or that they found NaN alone; change: of the rank's problem and its targets.
  std::set<std::string> errors_of(const std::function<void(int, logitless::Problem&, Case&)>& change) {
    std::vector<std::string> errors(kRanks);
    statuses_.assign(kRanks, LOGITLESS_OK);
    group_.run([&](int rank, const logitless::Communicator& communicator) {
      logitless::Problem p = problems_[static_cast<size_t>(rank)];
      Case c = case_;
      change(rank, p, c);
      try {
        const Outputs found = run_pass(context_, p, c, nullptr, &communicator);
        std::vector<double> all = found.d_hidden;
        all.insert(all.end(), found.d_classifier.begin(), found.d_classifier.end());
        all.insert(all.end(), found.lse.begin(), found.lse.end());
        all.push_back(found.loss[0]);
        const auto nans = std::ranges::count_if(all, [](double x) { return std::isnan(x); });
        if (nans > 0) errors[static_cast<size_t>(rank)] = "NaN";
        // An ignored row has zeros.
        const auto least = static_cast<std::ptrdiff_t>(all.size()) - most_ignored_ * (p.hidden + 1);
        EXPECT_TRUE(nans == 0 || (nans >= least && std::isnan(found.loss[0]))) << nans;
      } catch (const logitless::Error& error) {
        errors[static_cast<size_t>(rank)] = error.what();
        statuses_[static_cast<size_t>(rank)] = error.status();
      }
    });
    return {errors.begin(), errors.end()};
  }

  std::set<logitless_status> statuses() const { return {statuses_.begin(), statuses_.end()}; }

  // As many chunks of tokens as the plans have.
  void set_least_budget() {
    for (logitless::Problem& p : problems_) p.max_workspace_bytes = 0;
    const size_t least = *plan_bytes(problems_[0]).begin();
    for (logitless::Problem& p : problems_) p.max_workspace_bytes = least;
  }

  // Nothing is waited for on a device, so that which rows a rank computes is not compared as on the host.
  bool is_on_host() const { return !is_device(); }

  Case case_;
  std::vector<logitless::Problem> problems_;
  std::vector<logitless_status> statuses_;
  int64_t most_ignored_ = 0;
  RankGroup group_{kRanks, is_device()};
  std::string expected(const std::string& on_host) const { return is_device() ? "NaN" : on_host; }
};

TEST_P(GroupCuts, RefusesWhatMakesNoVocabulary) {
  const auto right = [](int, logitless::Problem&, Case&) {};
  const std::string follow =
      "vocab_start: expected shards that follow one another from 0 to vocab_total = 30, got ";
  const auto expect = [&](const std::string& message,
                          const std::function<void(logitless::Problem&, Case&)>& wrong) {
    EXPECT_EQ(errors_of([&](int rank, logitless::Problem& p, Case& c) {
                if (rank == 1) wrong(p, c);
              }),
              std::set<std::string>{expected(message)});
    if (is_on_host()) {
      EXPECT_EQ(statuses(), std::set<logitless_status>{LOGITLESS_INVALID_ARGUMENT});
    }
    EXPECT_EQ(errors_of(right), std::set<std::string>{""});
  };
  expect(follow + "[0, 12), [11, 19), [20, 30)", [](logitless::Problem& p, Case&) { p.vocab_start = 11; });
  expect(follow + "[0, 12), [12, 19), [20, 30)", [](logitless::Problem& p, Case&) { p.vocab = 7; });
  expect(follow + "[0, 12), [0, 8), [20, 30)", [](logitless::Problem& p, Case&) { p.vocab_start = 0; });
  expect("vocab_total: expected the same on all ranks of the group, got 31 on rank 1 and 30 on rank 0",
         [](logitless::Problem& p, Case&) { p.vocab_total = 31; });
  const std::string others =
      "targets: expected the same on all ranks of the group, got others on rank 1 than on rank 0";
  expect(others, [](logitless::Problem&, Case& c) { std::swap(c.targets[0], c.targets[1]); });
  expect(others, [](logitless::Problem&, Case& c) {
    c.targets[0] += 2;
    c.targets[1] -= 1;
  });
}

// The last rank's own are fewer than vocab_total says.
TEST_P(GroupCuts, RefusesAVocabularyWithoutAnEnd) {
  const auto errors = errors_of([](int rank, logitless::Problem& p, Case&) {
    if (rank == 2) p.vocab = 9;
  });
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(
      *errors.begin(),
      expected(
          "vocab_start: expected shards that follow one another from 0 to vocab_total = 30, got [0, 12), "
          "[12, 20), [20, 29)"));
}

TEST_P(GroupCuts, RefusesAllChunksOfTokens) {
  set({1200, 900, 24}, {500, 0, 400});
  set_least_budget();
  if (engine().backend != "reference") {
    EXPECT_GT(logitless::Plan(context_, problems_[0]).info().gathers, 1);
  }
  const auto errors = errors_of([](int rank, logitless::Problem&, Case& c) {
    if (rank == 2) std::swap(c.targets[0], c.targets[1]);
  });
  EXPECT_EQ(errors,
            std::set<std::string>{expected("targets: expected the same on all ranks of the group, got "
                                           "others on rank 2 than on rank 0")});
}

// Ranks would gather the numbers of other rows, and not as often.
TEST_P(GroupCuts, RefusesOtherIgnoredRows) {
  if (!is_on_host()) GTEST_SKIP() << "no rank gathers the rows that count alone";
  const auto is = [](const std::string& error) { return std::set<std::string>{error}; };
  const std::string others = "targets: expected the same on all ranks of the group, got others on rank ";
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    set({seed % 4 == 0 ? 600 : 40, 30, 8}, {18, 0, 12});
    case_.problem.ignore_index = -7;
    for (logitless::Problem& p : problems_) {
      p.ignore_index = -7;
      p.reduction = LOGITLESS_REDUCTION_SUM;  // a number of no row, too
      if (seed % 2 == 1) p.pass = static_cast<int32_t>(logitless::Pass::forward);
      if (seed % 2 == 1) p.has.d_hidden = p.has.d_classifier = p.has.d_bias = false;
      if (seed % 2 == 1) p.group_d_hidden = LOGITLESS_D_HIDDEN_PART;
    }
    set_least_budget();
    const auto rows = static_cast<int64_t>(case_.targets.size());
    for (int64_t& target : case_.targets) {
      if (random.chance(0.25)) target = -7;
    }
    case_.targets[0] = 3;
    const int changed = static_cast<int>(random.integer(0, kRanks - 1));
    const int64_t first = random.integer(0, rows - 1);
    const int64_t count = random.integer(1, rows);
    const bool is_whole = random.chance(0.3);  // no row counts there
    EXPECT_EQ(errors_of([&](int rank, logitless::Problem&, Case& c) {
                if (rank != changed) return;
                c.targets[0] = -7;
                for (int64_t i = 0; i < rows; ++i) {
                  if (is_whole || (i >= first && i < first + count)) c.targets[static_cast<size_t>(i)] = -7;
                }
              }),
              is(others + (changed == 0 ? "1" : std::to_string(changed)) + " than on rank 0"));
    EXPECT_EQ(statuses(), std::set<logitless_status>{LOGITLESS_INVALID_ARGUMENT});
    EXPECT_EQ(errors_of([](int, logitless::Problem&, Case&) {}), is(""));
    std::fill(case_.targets.begin(), case_.targets.end(), -7);
    EXPECT_EQ(errors_of([](int, logitless::Problem&, Case&) {}), is(""));
  }
}

// Ranks have the same targets and ignore others of them.
TEST_P(GroupCuts, RefusesOtherRowsThatOptionsIgnore) {
  most_ignored_ = std::max<int64_t>(1, std::ranges::count(case_.targets, 5));
  const std::set<std::string> refused{
      expected("ignore_index, shift: expected the same rows to be ignored on all ranks of the group, got "
               "others on rank 2 than on rank 0")};
  EXPECT_EQ(errors_of([](int rank, logitless::Problem& p, Case&) {
              if (rank == 2) p.ignore_index = 5;
            }),
            refused);
  EXPECT_EQ(errors_of([](int rank, logitless::Problem& p, Case&) {
              if (rank == 2) p.shift = 1;
            }),
            refused);
  if (is_on_host()) {
    EXPECT_EQ(statuses(), std::set<logitless_status>{LOGITLESS_INVALID_ARGUMENT});
  }
}

// One rank alone could see it: the others would wait for that rank.
TEST_P(GroupCuts, RefusesATargetOutOfRange) {
  if (!is_on_host()) GTEST_SKIP() << "no target is read before the run";
  EXPECT_EQ(errors_of([](int rank, logitless::Problem&, Case& c) {
              if (rank == 1) c.targets[4] = 99;
            }),
            std::set<std::string>{
                "targets: expected the same on all ranks of the group, got others on rank 1 than on rank 0"});
  EXPECT_EQ(statuses(), std::set<logitless_status>{LOGITLESS_INVALID_ARGUMENT});
  case_.targets[4] = 99;
  EXPECT_EQ(errors_of([](int, logitless::Problem&, Case&) {}).size(), 1u);
  EXPECT_EQ(statuses(), std::set<logitless_status>{LOGITLESS_INVALID_TARGET});
}

LOGITLESS_TEST_ON(GroupCuts, engines());

}  // namespace
}  // namespace logitless_test
