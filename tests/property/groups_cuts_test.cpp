// Ranks whose shards make no vocabulary, or that have other targets: on the host all say so by the same
// error, on a device they find NaN. They run as before when they agree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "compare.h"
#include "rank_group.h"

namespace logitless_test {
namespace {

class GroupCuts : public testing::TestWithParam<Engine> {
 protected:
  static constexpr int kRanks = 3;

  void SetUp() override { set({20, 30, 8}, {12, 8, 10}); }

  void set(PlainSize size, const std::vector<int64_t>& shards) {
    case_ = plain_case(11, size, GetParam().plain_dtype());
    case_.problem.d_hidden_dtype = stats_dtype(case_.problem);
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
        EXPECT_TRUE(nans == 0 || nans == static_cast<std::ptrdiff_t>(all.size())) << nans;
      } catch (const logitless::Error& error) {
        EXPECT_EQ(error.status(), LOGITLESS_INVALID_ARGUMENT) << error.what();
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
    return {errors.begin(), errors.end()};
  }

  logitless::Context context_ = make_context(GetParam(), 1);
  Case case_;
  std::vector<logitless::Problem> problems_;
  RankGroup group_{kRanks, GetParam().is_device()};
  std::string expected(const std::string& on_host) const { return GetParam().is_device() ? "NaN" : on_host; }
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
  size_t least = SIZE_MAX;
  for (const logitless::PlanInfo& plan : context_.plans(problems_[0])) {
    least = std::min<size_t>(least, plan.workspace_bytes);
  }
  for (logitless::Problem& p : problems_) p.max_workspace_bytes = least;
  if (GetParam().backend != "reference") {
    EXPECT_GT(logitless::Plan(context_, problems_[0]).info().gathers, 1);
  }
  const auto errors = errors_of([](int rank, logitless::Problem&, Case& c) {
    if (rank == 2) std::swap(c.targets[0], c.targets[1]);
  });
  EXPECT_EQ(errors,
            std::set<std::string>{expected("targets: expected the same on all ranks of the group, got "
                                           "others on rank 2 than on rank 0")});
}

INSTANTIATE_TEST_SUITE_P(Engines, GroupCuts, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
