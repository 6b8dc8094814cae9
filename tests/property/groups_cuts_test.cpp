// Ranks whose shards make no vocabulary, or that have other targets or ignored rows. On the host all ranks
// give the same error; on a device their results are NaN. They run as before when they agree.
#include <set>

#include "groups_fixture.h"

namespace logitless_test {
namespace {

using Errors = std::set<std::string>;

class GroupCuts : public GroupTest {
 protected:
  static constexpr int kRanks = 3;

  GroupCuts() { context_ = make_context(engine(), 1); }
  void SetUp() override { set({20, 30, 8}, {12, 8, 10}); }

  void set(PlainSize size, const Sizes& shards) {
    case_ = plain(11, size);
    case_.problem.dtype.d_hidden = stats_dtype(case_.problem);
    case_.targets[0] = 5;
    case_.targets[1] = 17;
    problems_ = cut(pass_problem(case_, logitless::Pass::forward_backward), shards);
  }

  using Change = std::function<void(logitless::Problem&, Case&)>;
  // Runs all ranks, one of them with another problem and other targets. Returns the ranks' errors, "NaN"
  // where the results are NaN alone.
  Errors errors_of(
      int changed = 0, const Change& change = [](logitless::Problem&, Case&) {}) {
    std::vector<std::string> errors(kRanks);
    statuses_.assign(kRanks, LOGITLESS_OK);
    group_.run([&](int rank, const logitless::Communicator& communicator) {
      logitless::Problem p = problems_[static_cast<size_t>(rank)];
      Case c = case_;
      if (rank == changed) change(p, c);
      try {
        const Outputs got = run_pass(context_, p, c, nullptr, &communicator);
        int64_t all = 0, nans = 0;
        for (const auto* values : {&got.d_hidden, &got.d_weight, &got.lse, &got.loss}) {
          all += std::ssize(*values);
          nans += std::ranges::count_if(*values, [](double x) { return std::isnan(x); });
        }
        if (nans > 0) errors[static_cast<size_t>(rank)] = "NaN";
        // An ignored row has zeros.
        const int64_t least = all - most_ignored_ * (p.hidden + 1);
        EXPECT_TRUE(nans == 0 || (nans >= least && std::isnan(got.loss[0]))) << nans;
      } catch (const logitless::Error& error) {
        errors[static_cast<size_t>(rank)] = error.what();
        statuses_[static_cast<size_t>(rank)] = error.status();
      }
    });
    return {errors.begin(), errors.end()};
  }

  // Expects all ranks to refuse it.
  void expect_refused(const std::string& on_host, int changed, const Change& change) {
    EXPECT_EQ(errors_of(changed, change), Errors{is_device() ? "NaN" : on_host});
    if (!is_device()) {
      EXPECT_EQ(statuses(), std::set<logitless_status>{LOGITLESS_INVALID_ARGUMENT});
    }
  }

  std::set<logitless_status> statuses() const { return {statuses_.begin(), statuses_.end()}; }

  // Sets the budget with the most chunks of tokens that the plans have.
  void set_least_budget() {
    for (logitless::Problem& p : problems_) p.max_workspace_bytes = 0;
    const size_t least = *plan_bytes(problems_[0]).begin();
    for (logitless::Problem& p : problems_) p.max_workspace_bytes = least;
  }

  Case case_;
  std::vector<logitless::Problem> problems_;
  std::vector<logitless_status> statuses_;
  int64_t most_ignored_ = 0;
  RankGroup group_{kRanks, is_device()};
};

const std::string kFollow =
    "vocab_start: expected shards that follow one another from 0 to vocab_total = 30, got ";
const std::string kOthers = "targets: expected the same on all ranks of the group, got others on rank ";

TEST_P(GroupCuts, RefusesWhatMakesNoVocabulary) {
  const std::pair<std::string, Change> wrong[] = {
      {kFollow + "[0, 12), [11, 19), [20, 30)", [](logitless::Problem& p, Case&) { p.vocab_start = 11; }},
      {kFollow + "[0, 12), [12, 19), [20, 30)", [](logitless::Problem& p, Case&) { p.vocab = 7; }},
      {kFollow + "[0, 12), [0, 8), [20, 30)", [](logitless::Problem& p, Case&) { p.vocab_start = 0; }},
      {"vocab_total: expected the same on all ranks of the group, got 31 on rank 1 and 30 on rank 0",
       [](logitless::Problem& p, Case&) { p.vocab_total = 31; }},
      {kOthers + "1 than on rank 0",
       [](logitless::Problem&, Case& c) { std::swap(c.targets[0], c.targets[1]); }},
      {kOthers + "1 than on rank 0", [](logitless::Problem&, Case& c) {
         c.targets[0] += 2;
         c.targets[1] -= 1;
       }}};
  for (const auto& [message, change] : wrong) {
    expect_refused(message, 1, change);
    EXPECT_EQ(errors_of(), Errors{""});
  }
}

// The last rank has fewer columns than vocab_total needs.
TEST_P(GroupCuts, RefusesAVocabularyWithoutAnEnd) {
  expect_refused(kFollow + "[0, 12), [12, 20), [20, 29)", 2,
                 [](logitless::Problem& p, Case&) { p.vocab = 9; });
}

TEST_P(GroupCuts, RefusesAllChunksOfTokens) {
  set({1200, 900, 24}, {500, 0, 400});
  set_least_budget();
  if (engine().backend != "reference") {
    EXPECT_GT(logitless::Plan(context_, problems_[0]).info().gathers, 1);
  }
  expect_refused(kOthers + "2 than on rank 0", 2,
                 [](logitless::Problem&, Case& c) { std::swap(c.targets[0], c.targets[1]); });
}

// Ranks would gather the numbers of other rows, and not as often.
TEST_P(GroupCuts, RefusesOtherIgnoredRows) {
  if (is_device()) GTEST_SKIP() << "no rank gathers the rows that count alone";
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    set({seed % 4 == 0 ? 600 : 40, 30, 8}, {18, 0, 12});
    case_.problem.ignore_index = -7;
    for (logitless::Problem& p : problems_) {
      p.ignore_index = -7;
      p.reduction = LOGITLESS_REDUCTION_SUM;  // allows a number of no row
      if (seed % 2 == 0) continue;
      p.pass = static_cast<int32_t>(logitless::Pass::forward);
      p.has.d_hidden = p.has.d_weight = p.has.d_bias = false;
      p.group_d_hidden = LOGITLESS_D_HIDDEN_PART;
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
    expect_refused(kOthers + (changed == 0 ? "1" : std::to_string(changed)) + " than on rank 0", changed,
                   [&](logitless::Problem&, Case& c) {
                     c.targets[0] = -7;
                     for (int64_t i = 0; i < rows; ++i) {
                       if (is_whole || (i >= first && i < first + count))
                         c.targets[static_cast<size_t>(i)] = -7;
                     }
                   });
    EXPECT_EQ(errors_of(), Errors{""});
    std::fill(case_.targets.begin(), case_.targets.end(), -7);
    EXPECT_EQ(errors_of(), Errors{""});
  }
}

// Ranks have the same targets, but their options ignore different ones.
TEST_P(GroupCuts, RefusesOtherRowsThatOptionsIgnore) {
  most_ignored_ = std::max<int64_t>(1, std::ranges::count(case_.targets, 5));
  const std::string refused =
      "ignore_index, shift: expected the same rows to be ignored on all ranks of the group, got others on "
      "rank 2 "
      "than on rank 0";
  expect_refused(refused, 2, [](logitless::Problem& p, Case&) { p.ignore_index = 5; });
  expect_refused(refused, 2, [](logitless::Problem& p, Case&) { p.shift = 1; });
}

// One rank alone could see it, and the others would wait for that rank.
TEST_P(GroupCuts, RefusesATargetOutOfRange) {
  if (is_device()) GTEST_SKIP() << "no target is read before the run";
  expect_refused(kOthers + "1 than on rank 0", 1, [](logitless::Problem&, Case& c) { c.targets[4] = 99; });
  case_.targets[4] = 99;
  EXPECT_EQ(errors_of().size(), 1u);
  EXPECT_EQ(statuses(), std::set<logitless_status>{LOGITLESS_INVALID_TARGET});
}

LOGITLESS_TEST_ON(GroupCuts, engines());

}  // namespace
}  // namespace logitless_test
