// The number of launches in a run of each kind of plan. A run is captured in a CUDA graph, whose nodes are
// counted by name. Products are left out: cuBLASLt may cut one in two.
#include <cuda.h>

#include "device.h"

namespace logitless_test {
namespace {

template <class F>
F driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status{};
  cuda_check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &status));
  if (status != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("no ") + name);
  return reinterpret_cast<F>(function);
}

std::string name_of(CUgraphNode node) {
  static const auto type_of =
      driver_function<CUresult (*)(CUgraphNode, CUgraphNodeType*)>("cuGraphNodeGetType", 10000);
  static const auto parameters_of = driver_function<CUresult (*)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v2*)>(
      "cuGraphKernelNodeGetParams", 12000);
  static const auto name_of_function =
      driver_function<CUresult (*)(const char**, CUfunction)>("cuFuncGetName", 12030);
  static const auto name_of_kernel =
      driver_function<CUresult (*)(const char**, CUkernel)>("cuKernelGetName", 12030);
  CUgraphNodeType type{};
  if (type_of(node, &type) != CUDA_SUCCESS) return "?";
  if (type == CU_GRAPH_NODE_TYPE_MEMSET) return "memset";
  if (type == CU_GRAPH_NODE_TYPE_MEMCPY) return "memcpy";
  CUDA_KERNEL_NODE_PARAMS_v2 parameters{};
  const char* name = nullptr;
  if (type != CU_GRAPH_NODE_TYPE_KERNEL || parameters_of(node, &parameters) != CUDA_SUCCESS) return "?";
  const CUresult result = parameters.func != nullptr ? name_of_function(&name, parameters.func)
                                                     : name_of_kernel(&name, parameters.kern);
  return result == CUDA_SUCCESS && name != nullptr ? name : "?";
}

struct Launches {
  int own = 0;        // kernels of the library, and clears and copies
  std::string names;  // names of all, for people
};

Launches count(cudaGraph_t graph) {
  size_t nodes = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
  std::vector<cudaGraphNode_t> each(nodes);
  cuda_check(cudaGraphGetNodes(graph, each.data(), &nodes));
  Launches out;
  for (cudaGraphNode_t node : each) {
    const std::string name = name_of(node);
    const bool own = name.find("logitless") != std::string::npos || name.starts_with("mem") || name == "?";
    out.own += own ? 1 : 0;
    out.names += (own ? "\n  " : "\n  (") + name + (own ? "" : ")");
  }
  return out;
}

class LaunchCounts : public EngineTest {
 protected:
  struct Counted {
    logitless::PlanInfo plan;
    Launches launches;
  };

  Counted counted(const Case& c, logitless::Pass pass, size_t budget = 0) const {
    logitless::Problem problem = pass_problem(c, pass);
    problem.max_workspace_bytes = budget;
    const logitless::Plan plan(context_, problem);
    const PlainTensors tensors(c);
    const DeviceMemory workspace(plan.info().workspace_bytes);
    const Stream stream;
    const auto run = [&] {
      auto buffers = tensors.buffers(problem.pass);
      if (!problem.has.bias) buffers.bias = nullptr;
      plan.run(buffers, workspace.bytes(), stream);
    };
    run();  // the driver loads kernels at the first launch
    stream.wait();
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    run();
    cuda_check(cudaStreamEndCapture(stream, &graph));
    Counted out{plan.info(), count(graph)};
    cuda_check(cudaGraphDestroy(graph));
    return out;
  }

  static Case case_of() { return plain_case(1, {1000, 4800, 512}, LOGITLESS_BF16); }

  void expect_at_most(int most, const Case& c, logitless::Pass pass, int32_t kind) const {
    const Counted got = counted(c, pass);
    ASSERT_EQ(got.plan.kind, kind);
    EXPECT_LE(got.launches.own, most) << got.launches.names << got.plan.config;
  }
};

// Parts of `size` tokens or columns in a number of them; size 0: not cut.
int64_t parts(int64_t number, int64_t size) {
  return size == 0 ? 1 : (number + size - 1) / size;
}

// Targets, partials, sums, losses.
TEST_P(LaunchCounts, LossAlone) {
  Case c = case_of();
  c.problem.has.bias = c.problem.has.d_bias = 0;
  expect_at_most(4, c, logitless::Pass::forward, LOGITLESS_PLAN_FORWARD);
}

// Targets, rows, exp logits, four for blocks that are done again, losses and factors; sums of d_bias,
// d_hidden.
TEST_P(LaunchCounts, AllExpLogitsKept) {
  expect_at_most(10, case_of(), logitless::Pass::forward_backward, LOGITLESS_PLAN_WHOLE);
}

// A softcap bounds logits: no block is done again.
TEST_P(LaunchCounts, AllExpLogitsKeptWithSoftcap) {
  Case c = case_of();
  c.problem.softcap = 30;
  expect_at_most(6, c, logitless::Pass::forward_backward, LOGITLESS_PLAN_WHOLE);
}

// Targets, rows, coefficients; dz and sums of d_bias for each window; d_hidden.
TEST_P(LaunchCounts, Backward) {
  expect_at_most(6, case_of(), logitless::Pass::backward, LOGITLESS_PLAN_BACKWARD);
}

TEST_P(LaunchCounts, Sparsified) {
  Case c = case_of();
  c.problem.gradient = LOGITLESS_ALWAYS_SPARSIFIED;
  expect_at_most(33, c, logitless::Pass::forward_backward, LOGITLESS_PLAN_SPARSIFIED);
}

// Counts the launches of every plan of less memory.
TEST_P(LaunchCounts, EachChunkAndWindow) {
  const Case c = case_of();
  size_t budget = counted(c, logitless::Pass::forward_backward).plan.workspace_bytes;
  for (; budget > (size_t{1} << 20); budget = budget * 3 / 4) {
    try {
      const Counted got = counted(c, logitless::Pass::forward_backward, budget);
      const int64_t chunks = parts(c.problem.tokens, got.plan.token_chunk);
      const int64_t windows = parts(c.problem.vocab, got.plan.vocab_window);
      // Launches before and after; with a window of kept exp logits seven more a chunk.
      EXPECT_LE(got.launches.own, 2 + chunks * (9 + 2 * windows)) << got.plan.config << got.launches.names;
    } catch (const logitless::Error& error) {
      ASSERT_EQ(error.status(), LOGITLESS_BUDGET_TOO_SMALL) << error.what();
      break;
    }
  }
}

std::vector<Engine> fused_engines() {
  std::vector<Engine> out;
  for (const Engine& engine : device_engines()) {
    if (engine.engine == "sm90") out.push_back(engine);
  }
  return out;
}

LOGITLESS_TEST_ON(LaunchCounts, fused_engines());

}  // namespace
}  // namespace logitless_test
