// Bits are equal from run to run, for any number of threads, whoever's threads they are. The host's pool may
// run its tasks in any way: there is no deadlock, and there are few loops.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "engine_test.h"

namespace logitless_test {
namespace {

class Determinism : public EngineTest {
 protected:
  // Cases of which some are larger than one block of the kernels in each direction, and some have several
  // targets a row.
  std::vector<Case> cases() const {
    std::vector<Case> out;
    const auto add = [&](Case c) {
      if (engine().can_run(c.problem)) out.push_back(std::move(c));
    };
    Random random(1);
    // A fused engine takes the cases among the first 25 that have its operands.
    const uint64_t count = seeds(25) / (engine().is_fused() ? 4 : 1);
    for (Case c : random_cases(0, count, {.largest_dimension = 200})) {
      add(c);
      if (c.seed % 4 != 0) continue;
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

  // Runs again, and on the host for any number of threads, whoever's they are.
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

TEST_P(Determinism, SparsifiedGradientsSlow) {
  if (const std::string why = why_not_sparsified(engine()); !why.empty()) GTEST_SKIP() << why;
  std::vector<Case> exact = cases(), sparsified;
  // More columns than are drawn at a time.
  if (!engine().is_reference()) exact.push_back(plain(11, {70, is_slowed_down() ? 1500 : 9000, 33}));
  for (Case& c : exact) {
    if (!engine().can_sparsify(c.problem) || c.problem.targets_per_row > 0) continue;
    c.problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
    c.problem.seed = -3;
    for (double threshold : {0x1p-5, 0x1p-10}) {
      c.problem.threshold = threshold;
      sparsified.push_back(c);
    }
  }
  expect_same_bits(sparsified);
}

// Runs one plan in several threads at once, each with buffers of its own.
TEST_P(Determinism, ConcurrentRunsOfOnePlan) {
  if (is_device()) GTEST_SKIP() << "on host memory; tests/gpu has it on a device";
  const logitless::Context context = make_hosted_context(engine(), 2);
  const Case c = plain_case(3, {33, 129, 17});
  logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
  const logitless::Plan plan(context, problem);
  const size_t workspace_bytes = plan.info().workspace_bytes;
  std::vector<Outputs> results(6);
  std::vector<std::thread> threads;
  for (Outputs& result : results) {
    threads.emplace_back([&] {
      const logitless::Workspace workspace(workspace_bytes);
      RunTensors tensors(problem, c);
      tensors.add_inputs();
      tensors.add_outputs(0, false, false);
      for (int repeat = 0; repeat < 3; ++repeat) plan.run(tensors.buffers(), workspace.bytes());
      result = tensors.read();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(results[0].loss[0], 0);
  for (const Outputs& result : results) EXPECT_STREQ(first_difference(result, results[0]), "");
}

LOGITLESS_TEST_ON(Determinism, engines());

constexpr int kThreads = 5;

// Counts of a pool's calls.
struct Pool {
  int loops = 0;
  int64_t most_tasks = 0;
  void count(int64_t tasks) {
    ++loops;
    most_tasks = std::max(most_tasks, tasks);
  }
};

void in_order(int64_t tasks, logitless_task body, void* data, void* pool) {
  static_cast<Pool*>(pool)->count(tasks);
  for (int64_t task = 0; task < tasks; ++task) body(task, 0, data);
}

void in_reverse(int64_t tasks, logitless_task body, void* data, void* pool) {
  static_cast<Pool*>(pool)->count(tasks);
  for (int64_t task = tasks; task-- > 0;) body(task, kThreads - 1, data);
}

// Runs on two threads of the five, under numbers of their own.
void on_two_threads(int64_t tasks, logitless_task body, void* data, void* pool) {
  static_cast<Pool*>(pool)->count(tasks);
  std::atomic<int64_t> next{0};
  const auto work = [&](int32_t worker) {
    for (int64_t task = next++; task < tasks; task = next++) body(task, worker, data);
  };
  std::thread other(work, 3);
  work(1);
  other.join();
}

// Makes the thread with the first task late: it begins when all others have ended.
void with_a_late_thread(int64_t tasks, logitless_task body, void* data, void* pool) {
  static_cast<Pool*>(pool)->count(tasks);
  std::atomic<int64_t> next{1};
  const auto work = [&](int32_t worker) {
    for (int64_t task = next++; task < tasks; task = next++) body(task, worker, data);
  };
  std::thread first(work, 1), second(work, 2);
  first.join();
  second.join();
  if (tasks > 0) body(0, 0, data);
}

class Pools : public EngineTest {
 protected:
  // Large enough for several threads of the fastest instruction set, and several blocks.
  Case large_case() const {
    if (engine().is_reference()) return plain_case(5, {40, 150, 20});
    if (!is_slowed_down()) return plain_case(5, {300, 1500, 160});
    return plain_case(5, {300, 1000, engine().engine == "portable" ? 10 : 60});
  }
  std::vector<Case> cases() const {
    std::vector<Case> out{large_case(), large_case()};
    out[1].problem.softcap = 5;
    out[1].problem.label_smoothing = 0.1;
    for (Case& c : random_cases(40, seeds(16), {.largest_dimension = 200})) out.push_back(std::move(c));
    return out;
  }
};

TEST_P(Pools, SameBitsFromAnyPoolSlow) {
  if (is_device()) GTEST_SKIP() << "runs on a device use no threads";
  const logitless::Context one = make_context(engine(), 1);
  for (const Case& c : cases()) {
    const Outputs expected = logitless_test::solve(one, c);
    for (logitless_parallel_for run : {in_order, in_reverse, on_two_threads, with_a_late_thread}) {
      Pool pool;
      const logitless::Context context = make_hosted_context(engine(), kThreads, run, &pool);
      EXPECT_STREQ(first_difference(logitless_test::solve(context, c), expected), "") << describe(c);
      if (c.mode != Mode::kForwardBackward) continue;
      size_t least = ~size_t{0};
      for (const auto& plan : context.plans(pass_problem(c, logitless::Pass::forward_backward))) {
        least = std::min(least, plan.workspace_bytes);
      }
      EXPECT_STREQ(first_difference(logitless_test::solve(context, c, least), expected), "")
          << least << ", " << describe(c);
    }
  }
}

// A loop's end waits for a thread that comes late to every loop. One loop is one wait.
TEST_P(Pools, OneLoopForAChunkOfTokens) {
  if (is_device() || engine().is_reference()) GTEST_SKIP() << "only for the CPU's runs";
  Pool pool;
  const logitless::Context context = make_hosted_context(engine(), kThreads, in_order, &pool);
  Case c = large_case();
  c.mode = Mode::kForwardBackward;
  logitless_test::solve(context, c, LOGITLESS_FASTEST);  // one chunk
  EXPECT_EQ(pool.loops, 1);
  EXPECT_GT(pool.most_tasks, 1) << "no work for two threads";
  EXPECT_LE(pool.most_tasks, kThreads);
}

TEST_P(Pools, SmallProblemsTakeFewThreads) {
  if (is_device() || engine().is_reference()) GTEST_SKIP() << "only for the CPU's plans";
  if (engine().engine == "portable") GTEST_SKIP() << "slow enough for several threads";
  Pool pool;
  const logitless::Context context = make_hosted_context(engine(), 64, in_order, &pool);
  const auto threads_of = [&](PlainSize size) {
    const Case c = plain_case(6, size);
    const logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
    return logitless::Plan(context, problem).info().threads;
  };
  EXPECT_LE(threads_of({64, 1000, 64}), 2);
  EXPECT_EQ(threads_of({1, 1, 1}), 1);
  EXPECT_EQ(threads_of({1024, 4096, 1024}), 64);
  // A thread alone needs no pool.
  const Case c = plain_case(6, {4, 10, 8});
  logitless_test::solve(context, c);
  EXPECT_EQ(pool.loops, 0);
}

LOGITLESS_TEST_ON(Pools, engines());

}  // namespace
}  // namespace logitless_test
