// Runs on a device neither allocate nor wait. They work in CUDA graphs, on any stream, from several threads
// and on every device, and give the same bits each time.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "device.h"

namespace logitless_test {
namespace {

class Run : public EngineTest {
 protected:
  // A case over several tiles and chunks, with ragged ends. It has many more tokens than columns, so that
  // keeping the exp logits of a chunk of tokens is the fastest for some budgets.
  Case case_of() const {
    Case c = plain(1, {2000, 555, 72});
    for (size_t i = 0; i < c.targets.size(); i += 7) c.targets[i] = c.problem.ignore_index;
    return c;
  }

  struct Planned {
    logitless::Problem problem;
    logitless::Plan plan;
    logitless::PlanInfo info;
  };

  // Every plan that some budget gets, from the largest budget to the smallest: the next budget is always one
  // byte less than the plan before needs.
  std::vector<Planned> every_plan(const logitless::Problem& of_pass) const {
    std::vector<Planned> out;
    logitless::Problem problem = of_pass;
    try {
      for (;;) {
        logitless::Plan plan(context_, problem);
        const logitless::PlanInfo info = plan.info();
        out.push_back({problem, std::move(plan), info});
        const bool fits =
            problem.max_workspace_bytes == 0 || info.workspace_bytes <= problem.max_workspace_bytes;
        EXPECT_TRUE(fits) << info.workspace_bytes << " with a budget of " << problem.max_workspace_bytes;
        if (!fits || info.workspace_bytes <= 1) break;  // a budget of 0 would be none
        problem.max_workspace_bytes = info.workspace_bytes - 1;
      }
    } catch (const logitless::Error& error) {
      EXPECT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
    }
    return out;
  }

  enum class Which { kFastest, kFastestAndSmallest };

  // Every kind of plan: the fastest of each pass and kind, which queues the fewest launches, and the
  // smallest.
  std::vector<Planned> plans(const Case& c, Which which = Which::kFastestAndSmallest) const {
    std::vector<Planned> out;
    std::set<int32_t> kinds;
    for (logitless::Pass pass :
         {logitless::Pass::forward, logitless::Pass::forward_backward, logitless::Pass::backward}) {
      std::map<int32_t, std::vector<Planned>> by_kind;
      for (Planned& each : every_plan(pass_problem(c, pass))) {
        std::vector<Planned>& kept = by_kind[each.info.kind];
        if (kept.size() == 2) kept.pop_back();
        if (kept.empty() || which == Which::kFastestAndSmallest) kept.push_back(std::move(each));
      }
      for (auto& [kind, kept] : by_kind) {
        kinds.insert(kind);
        for (Planned& each : kept) out.push_back(std::move(each));
      }
    }
    EXPECT_EQ(kinds.size(), 5u) << "not every kind of plan was made";
    return out;
  }

  // A backward pass reads the lse of a forward pass.
  void prepare(const Case& c, const Planned& p, PlainTensors* tensors) const {
    tensors->clear();
    if (p.problem.pass != LOGITLESS_BACKWARD) return;
    const logitless::Plan forward(context_, pass_problem(c, logitless::Pass::forward));
    run_and_wait(forward, tensors->buffers(LOGITLESS_FORWARD));
  }

  std::vector<std::byte> run(const Case& c, const Planned& p, PlainTensors* tensors) const {
    prepare(c, p, tensors);
    run_and_wait(p.plan, tensors->buffers(p.problem.pass), Stream());
    return tensors->results();
  }

  // Uses each plan with its tensors, and with the results of a run before.
  template <class Use>
  void for_each_plan(Which which, const Use& use) const {
    const Case c = case_of();
    PlainTensors tensors(c);
    for (const Planned& p : plans(c, which)) {
      SCOPED_TRACE(p.info.config + std::string(", kind ") + std::to_string(p.info.kind));
      const std::vector<std::byte> expected = run(c, p, &tensors);
      prepare(c, p, &tensors);
      const DeviceMemory workspace(p.info.workspace_bytes);
      use(c, p, tensors, expected, [&](cudaStream_t stream) {
        p.plan.run(tensors.buffers(p.problem.pass), workspace.bytes(), stream);
      });
    }
  }
};

class Graph {
 public:
  // Captures in a mode in which any allocation or wait fails, in any thread.
  template <class F>
  Graph(cudaStream_t stream, const F& work) {
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    work();
    cuda_check(cudaStreamEndCapture(stream, &graph_));
    cuda_check(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const { cuda_check(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

TEST_P(Run, GraphsReplayTheSameBits) {
  Case other = case_of();
  for (size_t i = 0; i < other.targets.size(); i += 3)
    other.targets[i] = i % 2 == 0 ? other.problem.ignore_index : 17;
  PlainTensors others(other);
  for_each_plan(Which::kFastestAndSmallest, [&](const Case& c, const Planned& p, PlainTensors& tensors,
                                                const auto& expected, const auto& run_on) {
    const std::vector<std::byte> expected_of_other = run(other, p, &others);
    const Stream stream;
    const Graph graph(stream, [&] { run_on(stream); });
    const auto replayed = [&](const Case& now) {
      tensors.targets().write(encoded({now.targets.begin(), now.targets.end()}, LOGITLESS_I64));
      prepare(now, p, &tensors);
      graph.launch(stream);
      stream.wait();
      return tensors.results();
    };
    for (int replay = 0; replay < 3; ++replay) EXPECT_EQ(replayed(c) == expected, true);
    // A graph reads the buffers when it runs: other targets, other ignored rows.
    EXPECT_EQ(replayed(other) == expected_of_other, true);
    EXPECT_EQ(replayed(c) == expected, true);
  });
}

TEST_P(Run, AllocatesNothing) {
  for_each_plan(Which::kFastestAndSmallest,
                [&](const Case&, const Planned&, const PlainTensors&, const auto&, const auto& run_on) {
                  const Stream stream;
                  // A run that comes again becomes a graph, for which the driver takes a few MiB now and
                  // then.
                  for (int repeat = 0; repeat < 3; ++repeat) run_on(stream);
                  stream.wait();
                  size_t before = 0, after = 0, total = 0;
                  cuda_check(cudaMemGetInfo(&before, &total));
                  for (int repeat = 0; repeat < 3; ++repeat) {
                    run_on(stream);
                    cuda_check(cudaMemGetInfo(&after, &total));
                    EXPECT_EQ(after, before);
                  }
                  stream.wait();
                  cuda_check(cudaMemGetInfo(&after, &total));
                  EXPECT_EQ(after, before);
                });
}

// Holds up a stream until the host opens it, or for a few seconds.
struct Gate {
  int open, gave_up;
};
__global__ void gate_kernel(volatile Gate* gate) {
  const long long start = clock64();
  while (gate->open == 0) {
    if (clock64() - start < 6'000'000'000) continue;
    gate->gave_up = 1;
    return;
  }
}

// A run returns while its stream is held up by earlier work. Only plans of few launches are used: a stream
// holds about a thousand that wait, and the next one waits for room.
TEST_P(Run, WaitsForNothing) {
  volatile Gate* gate = nullptr;
  cuda_check(cudaHostAlloc(const_cast<Gate**>(&gate), sizeof(Gate), cudaHostAllocMapped));
  for_each_plan(Which::kFastest, [&](const Case& c, const Planned& p, PlainTensors& tensors,
                                     const auto& expected, const auto& run_on) {
    const Stream stream;
    // Kernels are loaded at their first launch, which waits. So all of them run once before, on this stream,
    // which also makes the stream's own resources.
    gate->open = 1;
    gate->gave_up = 0;
    gate_kernel<<<1, 1, 0, stream>>>(gate);
    run_on(stream);
    stream.wait();
    EXPECT_EQ(tensors.results() == expected, true);
    prepare(c, p, &tensors);
    cuda_check(cudaDeviceSynchronize());
    gate->open = 0;
    gate_kernel<<<1, 1, 0, stream>>>(gate);
    run_on(stream);
    EXPECT_EQ(gate->gave_up, 0);
    gate->open = 1;
    stream.wait();
    EXPECT_EQ(tensors.results() == expected, true);
  });
  cuda_check(cudaFreeHost(const_cast<Gate*>(gate)));
}

TEST_P(Run, StreamsAndThreadsAtOnce) {
  for_each_plan(Which::kFastestAndSmallest,
                [&](const Case& c, const Planned& p, const PlainTensors&, const auto& expected, const auto&) {
                  std::array<std::vector<std::byte>, 4> results;
                  std::vector<std::thread> threads;
                  for (auto& result : results) {
                    threads.emplace_back([&] {
                      cuda_check(cudaSetDevice(0));
                      PlainTensors own(c);
                      for (int repeat = 0; repeat < 3; ++repeat) result = run(c, p, &own);
                    });
                  }
                  for (std::thread& thread : threads) thread.join();
                  for (const auto& result : results) EXPECT_EQ(result == expected, true);
                });
}

TEST_P(Run, OnTheNullStream) {
  for_each_plan(Which::kFastestAndSmallest, [&](const Case&, const Planned&, const PlainTensors& tensors,
                                                const auto& expected, const auto& run_on) {
    run_on(nullptr);
    cuda_check(cudaDeviceSynchronize());
    EXPECT_EQ(tensors.results() == expected, true);
  });
}

// Contexts of other devices work while device 0 is the current one, and leave it so.
TEST_P(Run, OnEveryDevice) {
  int count = 0;
  cuda_check(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "there is one device";
  const Case c = case_of();
  const logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
  std::vector<std::byte> first;
  for (int device = 0; device < count; ++device) {
    cuda_check(cudaSetDevice(device));
    PlainTensors tensors(c);
    const logitless::Plan plan(context_on(engine(), device), problem);
    const DeviceMemory workspace(plan.info().workspace_bytes);
    const Stream stream;
    cuda_check(cudaSetDevice(0));
    plan.run(tensors.buffers(LOGITLESS_FORWARD_BACKWARD), workspace.bytes(), stream);
    int current = -1;
    cuda_check(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    stream.wait();
    if (device == 0) first = tensors.results();
    EXPECT_EQ(tensors.results() == first, true) << "device " << device;
  }
}

TEST_P(Run, ADeviceThatIsNotThere) {
  const logitless::Error error = refusal([&] { context_on(engine(), 1000); });
  EXPECT_EQ(error.status(), LOGITLESS_BACKEND_UNAVAILABLE);
  EXPECT_NE(std::string(error.what()).find("1000"), std::string::npos) << error.what();
}

// A gradient of d_weight in a dtype that no product writes goes through a window of the workspace. Here the
// window has fewer columns than the exp logits that are kept. The gradient is the one in float32, rounded.
TEST_P(Run, GradientsOfAThirdDtypeFromCachedExpLogits) {
  Case c = plain(1, {4096, 49150, 128});
  c.problem.reduction = LOGITLESS_REDUCTION_SUM;
  const auto n = static_cast<size_t>(c.problem.tokens), v = static_cast<size_t>(c.problem.vocab),
             d = static_cast<size_t>(c.problem.hidden);
  PlainTensors tensors(c);
  std::vector<std::byte> d_weight[2], d_bias[2];
  const logitless_dtype third = engine().plain_dtype() == LOGITLESS_BF16 ? LOGITLESS_F16 : LOGITLESS_BF16;
  const logitless_dtype dtypes[2] = {LOGITLESS_F32, third};
  for (int i = 0; i < 2; ++i) {
    logitless::Problem problem = pass_problem(c, logitless::Pass::forward_backward);
    problem.dtype.d_weight = dtypes[i];
    const logitless::Plan plan(context_, problem);
    EXPECT_EQ(plan.info().kind, LOGITLESS_PLAN_WHOLE) << plan.info().config;
    const DeviceMemory gradient(v * d * size_of(dtypes[i]));
    tensors.clear();
    logitless::Buffers b = tensors.buffers(LOGITLESS_FORWARD_BACKWARD);
    b.d_weight = gradient.as();
    run_and_wait(plan, b);
    d_weight[i] = gradient.read();
    d_bias[i].resize(v * size_of(engine().plain_dtype()));
    cuda_check(cudaMemcpy(d_bias[i].data(), b.d_bias, d_bias[i].size(), cudaMemcpyDeviceToHost));
  }
  EXPECT_EQ(d_bias[0] == d_bias[1], true);
  // Two fp32 sums of n terms each, whose magnitudes add up to sum_i (p_ij + [j = y_i]) times the largest |E|.
  std::vector<double> counts(v);
  for (int64_t y : c.targets) {
    if (y != c.problem.ignore_index) ++counts[static_cast<size_t>(y)];
  }
  double largest = 0;
  for (double value : c.hidden) largest = std::max(largest, std::fabs(value));
  for (size_t j = 0; j < v; ++j) {
    const double bias = load(d_bias[0].data(), engine().plain_dtype(), static_cast<int64_t>(j));
    const double sums = static_cast<double>(n) * 0x1p-23 * (1.01 * std::fabs(bias) + 2 * counts[j]) * largest;
    for (size_t k = j * d; k < (j + 1) * d; ++k) {
      const double expected = load(d_weight[0].data(), LOGITLESS_F32, static_cast<int64_t>(k));
      const double got = load(d_weight[1].data(), third, static_cast<int64_t>(k));
      ASSERT_TRUE(is_close(got, expected, sums * (1 + rounding_unit(third)), third))
          << "d_weight[" << j << "][" << k % d << "] = " << got << " instead of " << expected;
    }
  }
}

LOGITLESS_TEST_ON(Run, device_engines());

}  // namespace
}  // namespace logitless_test
