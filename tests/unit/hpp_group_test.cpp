// Refusals of problems of a group, and the numbers in their plans.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "logitless/distributed.h"

#include "c_calls.h"

namespace {

logitless::Problem group_problem() {
  logitless::Problem p;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.tokens = 8;
  p.vocab = 10;
  p.vocab_start = 5;
  p.vocab_total = 40;
  p.hidden = 4;
  p.has.d_hidden = p.has.d_weight = 1;
  p.group_size = 3;
  p.group_vocab = 25;
  p.group_d_hidden = LOGITLESS_D_HIDDEN_SUM;
  return p;
}

class Group : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(logitless_context_create(nullptr, &context_), LOGITLESS_OK); }
  void TearDown() override {
    logitless_plan_destroy(plan_);
    logitless_context_destroy(context_);
  }
  logitless_status plan(const logitless::Problem& p) {
    logitless_plan_destroy(plan_);
    plan_ = nullptr;
    return logitless_plan_create(context_, &p, &plan_);
  }
  logitless_plan_info info() const {
    logitless_plan_info info;
    EXPECT_EQ(logitless_plan_get_info(plan_, &info), LOGITLESS_OK);
    return info;
  }

  logitless_context* context_ = nullptr;
  logitless_plan* plan_ = nullptr;
};

TEST_F(Group, RefusesWhatRanksCannotDo) {
  using P = logitless::Problem;
  const auto alone = [](P& p) { p.group_size = p.group_d_hidden = 0, p.pass = LOGITLESS_BACKWARD; };
  const auto forward = [](P& p) {
    p.pass = LOGITLESS_FORWARD;
    p.has.d_hidden = p.has.d_weight = false;
    p.group_d_hidden = 0;
  };
  const std::pair<const char*, std::function<void(P&)>> refused[] = {
      {"group_size: expected a number in [0, ", [](P& p) { p.group_size = -1, p.pass = LOGITLESS_BACKWARD; }},
      {"group_vocab: expected a number in [10, 40], got 9", [](P& p) { p.group_vocab = 9; }},
      {"group_vocab: expected 0 without group_size, got 25", alone},
      {"d_hidden.accumulate: expected 0 where d_hidden is added up over a group, got 1",
       [](P& p) { p.accumulate.d_hidden = 1; }},
      {"group_d_hidden: expected 0 (LOGITLESS_D_HIDDEN_PART) without d_hidden, got 1",
       [](P& p) { p.has.d_hidden = 0; }},
      {"tokens: expected a multiple of group_size = 3 (every rank gets its part of d_hidden), got 8",
       [](P& p) { p.group_d_hidden = LOGITLESS_D_HIDDEN_SUM_OF_OWN; }},
      {"top_k: expected 0 (none) or a number in [1, 40] (the smaller one of 64 and vocab_total), got 41",
       [&](P& p) { forward(p), p.top_k = 41; }},
      {"top_k: expected 0 for a shard of the vocabulary without group_size, got 2",
       [&](P& p) { forward(p), p.top_k = 2, p.group_size = p.group_vocab = 0; }}};
  for (const auto& [message, spoil] : refused) {
    P p = group_problem();
    spoil(p);
    EXPECT_EQ(plan(p), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(logitless_last_error()).substr(0, std::strlen(message)), message);
  }
}

TEST_F(Group, PlansTellWhatIsExchanged) {
  logitless::Problem p = group_problem();
  p.has.argmax = 1;
  p.label_smoothing = 0.1;
  ASSERT_EQ(plan(p), LOGITLESS_OK) << logitless_last_error();
  const logitless_plan_info of_shard = info();
  EXPECT_EQ(of_shard.gathers, 2);
  // Each rank's cut and digests; then max, sum_exp, target_logit, argmax, the weighted sum and its weights,
  // in float64.
  EXPECT_EQ(of_shard.gathered_bytes, size_t{3 * (5 + 6 * 8) * 8});
  EXPECT_EQ(of_shard.reduced_bytes, size_t{8 * 4 * 4});
  p.vocab = 0;  // an empty shard of the same group
  ASSERT_EQ(plan(p), LOGITLESS_OK) << logitless_last_error();
  EXPECT_EQ(info().workspace_bytes, of_shard.workspace_bytes);
  EXPECT_EQ(info().token_chunk, of_shard.token_chunk);
  EXPECT_EQ(info().gathered_bytes, of_shard.gathered_bytes);
}

TEST_F(Group, RunsWantTheCommunicatorOfTheirPlan) {
  ASSERT_EQ(plan(group_problem()), LOGITLESS_OK) << logitless_last_error();
  logitless::Buffers buffers;
  logitless_communicator communicator;
  logitless_communicator_init(&communicator);
  const auto expect_refused = [&](const char* message) {
    EXPECT_EQ(logitless_run_group(plan_, &buffers, nullptr, 0, nullptr, &communicator),
              LOGITLESS_INVALID_ARGUMENT);
    EXPECT_STREQ(logitless_last_error(), message);
  };
  EXPECT_EQ(logitless_run(plan_, &buffers, nullptr, 0, nullptr), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_STREQ(
      logitless_last_error(),
      "plan: expected one without group_size (logitless_run_group runs one of a group), got one with "
      "group_size");
  expect_refused("communicator.size: expected 3, the plan's group_size, got 1");
  communicator.size = 3;
  expect_refused("communicator.all_gather: expected a function, got null");
  communicator.all_gather = [](const void*, void*, int64_t, int32_t, void*, void*) -> int32_t { return 0; };
  expect_refused("communicator.all_reduce: expected a function (d_hidden is added up), got null");
  communicator.rank = 3;
  expect_refused("communicator.rank: expected 0 to 2, got 3");
  communicator.rank = 0;
  communicator.all_reduce = [](void*, int64_t, int32_t, void*, void*) -> int32_t { return 0; };
  logitless::Problem sparsified = group_problem();
  sparsified.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
  ASSERT_EQ(plan(sparsified), LOGITLESS_OK) << logitless_last_error();
  EXPECT_EQ(info().kind, LOGITLESS_PLAN_SPARSIFIED);
  std::vector<float> some(200);
  buffers.hidden = buffers.weight = buffers.targets = some.data();
  buffers.d_hidden = buffers.d_weight = some.data();
  buffers.kept_count = reinterpret_cast<int32_t*>(some.data());
  expect_refused(
      "kept_count: expected null without a pass that makes sparsified gradients, and in a group (a rank "
      "knows only its own elements), got a pointer");
  buffers = {};
  logitless::Problem alone = group_problem();
  alone.group_size = alone.group_d_hidden = 0;
  alone.group_vocab = 0;
  alone.pass = LOGITLESS_BACKWARD;
  ASSERT_EQ(plan(alone), LOGITLESS_OK) << logitless_last_error();
  expect_refused("plan: expected one with group_size for a run of a group, got one without");
}

TEST_F(Group, SaysWhereThereIsNoNccl) {
  logitless_communicator communicator;
  logitless_communicator_init(&communicator);
  EXPECT_EQ(logitless_communicator_from_nccl(nullptr, &communicator), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_STREQ(logitless_last_error(), "nccl_comm: expected a pointer, got null");
  ASSERT_EQ(setenv("LOGITLESS_NCCL_LIBRARY", "no_such_library.so", 1), 0);
  int any = 0;
  EXPECT_EQ(logitless_communicator_from_nccl(&any, &communicator), LOGITLESS_BACKEND_UNAVAILABLE);
  EXPECT_EQ(std::string(logitless_last_error()).substr(0, 38), "NCCL: cannot open no_such_library.so: ");
  unsetenv("LOGITLESS_NCCL_LIBRARY");
}

}  // namespace
