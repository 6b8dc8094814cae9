// The same bits from run to run, for any number of threads, whoever's threads they are.
#include <gtest/gtest.h>

#include <thread>

#include "engine_test.h"

namespace logitless_test {
namespace {

class Determinism : public EngineTest {
 protected:
  // Some larger than one block of the kernels in each direction, some with several targets a row.
  std::vector<Case> cases() const {
    std::vector<Case> out;
    const auto add = [&](Case c) {
      if (engine().can_run(c.problem)) out.push_back(std::move(c));
    };
    Random random(1);
    for (uint64_t seed = 0; seed < seeds(25); ++seed) {
      Case c = random_case(seed, {.largest_dimension = 200, .allow_fp64 = engine().has_float64()});
      add(c);
      if (seed % 4 != 0) continue;
      give_targets(random, &c, 9, 0, 1);
      add(c);
    }
    const PlainSize size = engine().is_reference() ? PlainSize{40, 150, 20}
                           : is_slowed_down()      ? PlainSize{300, 600, 20}
                                                   : PlainSize{300, 1500, 70};
    for (logitless_dtype dtype : {engine().plain_dtype(), LOGITLESS_BF16}) {
      Case c = plain_case(7, size, dtype);
      add(c);
      c.mode = Mode::kForward;
      c.problem.top_k = 32;
      add(c);
    }
    return out;
  }

  // Again, and on the host for any number of threads, whoever's they are.
  void expect_same_bits(const std::vector<Case>& cases) const {
    std::vector<logitless::Context> others;
    if (!is_device()) {
      for (int threads : {1, 2, 3, 8}) others.push_back(make_context(engine(), threads));
      for (int threads : {1, 2, 3, 8}) others.push_back(make_hosted_context(engine(), threads));
    }
    for (const Case& c : cases) {
      const Outputs first = solve(c);
      for (int repeat = 0; repeat < 3; ++repeat) {
        EXPECT_STREQ(first_difference(solve(c), first), "") << describe(c);
      }
      for (const logitless::Context& other : others) {
        EXPECT_STREQ(first_difference(logitless_test::solve(other, c), first), "") << describe(c);
      }
    }
  }
};

TEST_P(Determinism, FromRunToRunAndForAnyThreads) {
  expect_same_bits(cases());
}

TEST_P(Determinism, OfThinnedGradientsSlow) {
  if (const std::string why = why_not_thinned(engine()); !why.empty()) GTEST_SKIP() << why;
  std::vector<Case> exact = cases(), thinned;
  // More columns than are drawn at a time.
  if (!engine().is_reference()) exact.push_back(plain(11, {70, is_slowed_down() ? 1500 : 9000, 33}));
  for (Case& c : exact) {
    if (!engine().can_thin(c.problem) || c.problem.targets_per_row > 0) continue;
    c.problem.gradient = LOGITLESS_ALWAYS_THINNED;
    c.problem.seed = -3;
    for (double threshold : {0x1p-5, 0x1p-10}) {
      c.problem.threshold = threshold;
      thinned.push_back(c);
    }
  }
  expect_same_bits(thinned);
}

// One plan in several threads at once, each with buffers of its own.
TEST_P(Determinism, ConcurrentRunsOfOnePlan) {
  if (is_device()) GTEST_SKIP() << "on host memory; tests/gpu has it on a device";
  const logitless::Context context = make_hosted_context(engine(), 2);
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

LOGITLESS_TEST_ON(Determinism, engines());

}  // namespace
}  // namespace logitless_test
