// Runs that come again with the same pointers are launched as one graph. Their results must not depend on it.
#include <array>
#include <deque>
#include <optional>
#include <thread>

#include "device.h"

namespace logitless_test {
namespace {

constexpr int kRuns = 6;  // the first ones are launched one by one

class Replays : public EngineTest {
 protected:
  Case case_of(uint64_t seed) const {
    Case c = plain(seed, {700, 555, 72});
    for (size_t i = 0; i < c.targets.size(); i += 5) c.targets[i] = c.problem.ignore_index;
    return c;
  }

  logitless::Plan plan_of(const Case& c, const char* gradient, size_t budget = 0) const {
    logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
    problem.max_workspace_bytes = budget;
    if (std::string(gradient) == "sparsified") {
      problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
      problem.threshold = 0x1p-6;
    }
    return logitless::Plan(context_, problem);
  }

  // A plan's runs over buffers of its own, which hold NaN before each run.
  struct Runs {
    Runs(const Case& c, const logitless::Plan& plan) : tensors(c), workspace(plan.info().workspace_bytes) {}
    std::vector<std::byte> results_of(const logitless::Plan& plan, cudaStream_t on) {
      tensors.clear();
      plan.run(tensors.buffers(LOGITLESS_FORWARD_BACKWARD), workspace.bytes(), on);
      cuda_check(cudaStreamSynchronize(on));
      return tensors.results();
    }
    std::vector<std::byte> results_of(const logitless::Plan& plan) { return results_of(plan, stream); }

    PlainTensors tensors;
    DeviceMemory workspace;
    Stream stream;
  };

  // The results of a plan's first run.
  std::vector<std::byte> expected(const Case& c, const char* gradient, size_t budget = 0) const {
    const logitless::Plan plan = plan_of(c, gradient, budget);
    return Runs(c, plan).results_of(plan);
  }
};

// Other targets are written between the runs. The device finds the ignored rows anew in each run.
TEST_P(Replays, ReadWhatTheBuffersHold) {
  const Case cases[2] = {case_of(1), [&] {
                           Case other = case_of(1);
                           for (size_t i = 0; i < other.targets.size(); i += 3) other.targets[i] = 17;
                           return other;
                         }()};
  for (const char* gradient : {"exact", "sparsified"}) {
    for (const size_t budget : {size_t{0}, size_t{900} << 10}) {
      if (budget != 0 && gradient == std::string("sparsified")) continue;
      SCOPED_TRACE(std::string(gradient) + ", " + std::to_string(budget));
      const std::vector<std::byte> results[2] = {expected(cases[0], gradient, budget),
                                                 expected(cases[1], gradient, budget)};
      ASSERT_NE(results[0] == results[1], true);
      const logitless::Plan plan = plan_of(cases[0], gradient, budget);
      Runs runs(cases[0], plan);
      for (int run = 0; run < kRuns; ++run) {
        const Case& now = cases[run % 2];
        runs.tensors.targets().write(encoded({now.targets.begin(), now.targets.end()}, LOGITLESS_I64));
        EXPECT_EQ(runs.results_of(plan) == results[run % 2], true) << "run " << run;
      }
    }
  }
}

// The driver's memory for graphs belongs to no budget, and is little.
TEST_P(Replays, TakeLittleMemory) {
  constexpr int kPlans = 64;
  const Case c = case_of(6);
  PlainTensors tensors(c);
  std::vector<logitless::Plan> plans;
  const DeviceMemory workspace(plan_of(c, "exact").info().workspace_bytes);
  const Stream stream;
  size_t before = 0, after = 0, total = 0;
  for (int i = 0; i <= kPlans; ++i) {
    plans.push_back(plan_of(c, "exact"));
    for (int run = 0; run < kRuns; ++run) {
      plans.back().run(tensors.buffers(LOGITLESS_FORWARD_BACKWARD), workspace.bytes(), stream);
    }
    stream.wait();
    cuda_check(cudaMemGetInfo(i == 0 ? &before : &after, &total));
  }
  const double each = (static_cast<double>(before) - static_cast<double>(after)) / kPlans;
  RecordProperty("bytes_of_a_recording", std::to_string(each));
  EXPECT_LT(each, double{1 << 20}) << "bytes a recording";
}

// More sets of buffers than are remembered come in turn, each often enough to be recorded.
TEST_P(Replays, WriteToTheBuffersThatAreGiven) {
  const Case c = case_of(2);
  const std::vector<std::byte> result = expected(c, "exact");
  const logitless::Plan plan = plan_of(c, "exact");
  for (const int sets : {2, 4, 7}) {
    std::deque<Runs> all;
    for (int i = 0; i < sets; ++i) all.emplace_back(c, plan);
    for (int run = 0; run < kRuns * sets; ++run) {
      const bool in_turn = run < 3 * sets;
      Runs& own = all[static_cast<size_t>(in_turn ? run % sets : run / 3 % sets)];
      EXPECT_EQ(own.results_of(plan) == result, true) << sets << " sets, run " << run;
    }
  }
}

TEST_P(Replays, ThreadsThatShareAPlan) {
  const Case c = case_of(3);
  const std::vector<std::byte> result = expected(c, "exact");
  const logitless::Plan plan = plan_of(c, "exact");
  std::array<int, 4> wrong{};
  std::vector<std::thread> threads;
  for (int& count : wrong) {
    threads.emplace_back([&] {
      cuda_check(cudaSetDevice(0));
      Runs runs(c, plan);
      for (int run = 0; run < 20; ++run) count += runs.results_of(plan) != result;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) EXPECT_EQ(count, 0);
}

// Runs of one graph on several streams wait for each other, and are ordered with the streams' other work.
TEST_P(Replays, OnOtherStreams) {
  const Case c = case_of(4);
  const std::vector<std::byte> result = expected(c, "exact");
  const logitless::Plan plan = plan_of(c, "exact");
  Runs runs(c, plan);
  const Stream streams[2];
  for (int run = 0; run < 2 * kRuns; ++run) {
    EXPECT_EQ(runs.results_of(plan, streams[run % 2]) == result, true) << "run " << run;
  }
  EXPECT_EQ(runs.results_of(plan, nullptr) == result, true) << "null stream";
}

// A host may forget a plan while its runs are queued, and others' captures go on beside a recording.
TEST_P(Replays, OutliveTheirPlan) {
  const Case c = case_of(5);
  const std::vector<std::byte> result = expected(c, "exact");
  std::optional<logitless::Plan> plan(plan_of(c, "exact"));
  PlainTensors tensors(c);
  const DeviceMemory workspace(plan->info().workspace_bytes), filler(size_t{256} << 20);
  const Stream stream, other;
  for (int run = 0; run < kRuns; ++run) {
    tensors.clear();
    cuda_check(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal));
    plan->run(tensors.buffers(LOGITLESS_FORWARD_BACKWARD), workspace.bytes(), stream);
    cudaGraph_t captured = nullptr;
    cuda_check(cudaStreamEndCapture(other, &captured));
    cuda_check(cudaGraphDestroy(captured));
    stream.wait();
    EXPECT_EQ(tensors.results() == result, true) << "run " << run;
  }
  tensors.clear();
  for (int i = 0; i < 20; ++i) cuda_check(cudaMemsetAsync(filler.as(), i, filler.size(), stream));
  plan->run(tensors.buffers(LOGITLESS_FORWARD_BACKWARD), workspace.bytes(), stream);
  plan.reset();
  stream.wait();
  EXPECT_EQ(tensors.results() == result, true) << "after its plan";
}

LOGITLESS_TEST_ON(Replays, device_engines());

}  // namespace
}  // namespace logitless_test
