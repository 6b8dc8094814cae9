// The same bits from run to run, for any number of threads, whoever's threads they are.
#include <gtest/gtest.h>

#include <thread>

#include "compare.h"

namespace logitless_test {
namespace {

class Determinism : public testing::TestWithParam<Engine> {
 protected:
  // Some larger than one block of the kernels in each direction.
  std::vector<Case> cases() const {
    std::vector<Case> out;
    for (uint64_t seed = 0; seed < seeds(25); ++seed) {
      Case c = random_case(seed, {.largest_dimension = 200, .allow_fp64 = GetParam().has_float64()});
      if (GetParam().can_run(c.problem)) out.push_back(std::move(c));
    }
    const bool fast = !GetParam().is_reference();
    for (logitless_dtype dtype : {GetParam().plain_dtype(), LOGITLESS_BF16}) {
      out.push_back(plain_case(7,
                               fast
                                   ? PlainSize{300, is_slowed_down() ? 600 : 1500, is_slowed_down() ? 20 : 70}
                                   : PlainSize{40, 150, 20},
                               dtype));
    }
    return out;
  }
};

TEST_P(Determinism, FromRunToRun) {
  const logitless::Context context = make_context(GetParam());
  for (const Case& c : cases()) {
    const Outputs first = solve(context, c);
    for (int repeat = 0; repeat < 3; ++repeat) {
      EXPECT_STREQ(first_difference(solve(context, c), first), "") << describe(c);
    }
  }
}

TEST_P(Determinism, ForAnyNumberOfThreads) {
  if (GetParam().is_device()) GTEST_SKIP() << "runs on a device use no threads";
  const logitless::Context one = make_context(GetParam(), 1);
  std::vector<logitless::Context> others;
  for (int threads : {2, 3, 8}) others.push_back(make_context(GetParam(), threads));
  for (int threads : {1, 2, 3, 8}) others.push_back(make_hosted_context(GetParam(), threads));
  for (const Case& c : cases()) {
    const Outputs first = solve(one, c);
    for (const logitless::Context& other : others) {
      EXPECT_STREQ(first_difference(solve(other, c), first), "") << describe(c);
    }
  }
}

// One plan in several threads at once, each with buffers of its own.
TEST_P(Determinism, ConcurrentRunsOfOnePlan) {
  if (GetParam().is_device()) GTEST_SKIP() << "on host memory; tests/gpu has it on a device";
  const logitless::Context context = make_hosted_context(GetParam(), 2);
  const Case c = plain_case(3, {33, 129, 17});
  logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
  const logitless::Plan plan(context, problem);
  const size_t workspace_bytes = plan.info().workspace_bytes;
  struct Result {
    float loss = 0;
    std::vector<float> d_hidden = std::vector<float>(33 * 17), d_classifier = std::vector<float>(129 * 17),
                       d_bias = std::vector<float>(129);
    bool operator==(const Result&) const = default;
  };
  const std::vector<float> hidden(c.hidden.begin(), c.hidden.end());
  const std::vector<float> classifier(c.classifier.begin(), c.classifier.end());
  const std::vector<float> bias(c.bias.begin(), c.bias.end());
  std::vector<Result> results(6);
  std::vector<std::thread> threads;
  for (Result& result : results) {
    threads.emplace_back([&] {
      const logitless::Workspace workspace(workspace_bytes);
      logitless::Buffers b;
      b.hidden = hidden.data();
      b.classifier = classifier.data();
      b.bias = bias.data();
      b.targets = c.targets.data();
      b.loss = &result.loss;
      b.d_hidden = result.d_hidden.data();
      b.d_classifier = result.d_classifier.data();
      b.d_bias = result.d_bias.data();
      for (int repeat = 0; repeat < 3; ++repeat) plan.run(b, workspace.bytes());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(results[0].loss, 0);
  for (const Result& result : results) EXPECT_TRUE(result == results[0]);
}

INSTANTIATE_TEST_SUITE_P(Engines, Determinism, testing::ValuesIn(engines()),
                         [](const auto& parameter) { return parameter.param.name(); });

}  // namespace
}  // namespace logitless_test
