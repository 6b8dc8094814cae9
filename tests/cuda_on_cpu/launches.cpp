// Launches and graphs of CUDA's runtime.
#include "launches.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "grid.h"

namespace {

struct Known {
  std::string name;
  cuda_on_cpu::Binding bind;
};

struct Call {
  std::shared_ptr<cuda_on_cpu::Grid> grid;  // null: no kernel
  std::function<void()> body;

  void operator()() const {
    if (grid == nullptr) {
      body();
    } else {
      cuda_on_cpu::run(*grid, body);
    }
  }
};

// Graphs and executable graphs are lists of calls.
using Calls = std::vector<Call>;

Calls& calls(void* graph) {
  return *static_cast<Calls*>(graph);
}

std::mutex mutex;

std::map<const void*, Known>& known() {
  static std::map<const void*, Known> kernels;
  return kernels;
}

void set(cuda_on_cpu::Grid& grid, cudaLaunchAttributeID id) {
  if (id == cudaLaunchAttributeCooperative) grid.is_cooperative = true;
}

Call make_call(dim3 blocks, dim3 threads, size_t shared_bytes, const void* kernel, void** arguments) {
  const std::lock_guard lock(mutex);
  const auto at = known().find(kernel);
  if (at == known().end()) cuda_on_cpu::fail("a kernel whose type is not known is launched");
  const size_t count = size_t{threads.x} * threads.y * threads.z;
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.y > 65535 || blocks.z > 65535 || count == 0 ||
      count > 1024) {
    cuda_on_cpu::fail((at->second.name + " is launched with sizes that no device takes").c_str());
  }
  using cuda_on_cpu::Grid;
  return {std::make_shared<Grid>(Grid{blocks, threads, shared_bytes, false, at->second.name.c_str()}),
          at->second.bind(arguments)};
}

cudaError_t add(cudaGraphNode_t* node, cudaGraph_t graph, Call call) {
  *node = reinterpret_cast<cudaGraphNode_t>(call.grid.get());
  calls(graph).push_back(std::move(call));
  return cudaSuccess;
}

}  // namespace

void cuda_on_cpu::remember(const void* kernel, const char* name, Binding bind) {
  const std::lock_guard lock(mutex);
  known().try_emplace(kernel, Known{name, std::move(bind)});
}

extern "C" {

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  const Call call = make_call(config->gridDim, config->blockDim, config->dynamicSmemBytes, kernel, arguments);
  for (unsigned i = 0; i < config->numAttrs; ++i) set(*call.grid, config->attrs[i].id);
  call();
  return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  *graph = reinterpret_cast<cudaGraph_t>(new Calls);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Calls*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t*, size_t,
                                   const cudaKernelNodeParams* of) {
  return add(node, graph,
             make_call(of->gridDim, of->blockDim, of->sharedMemBytes, of->func, of->kernelParams));
}
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaLaunchAttributeID id,
                                            const cudaLaunchAttributeValue*) {
  set(*reinterpret_cast<cuda_on_cpu::Grid*>(node), id);
  return cudaSuccess;
}
cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t*, size_t,
                                   const cudaMemsetParams* of) {
  return add(node, graph, {nullptr, [given = *of] {
                             std::memset(given.dst, static_cast<int>(given.value), given.width);
                           }});
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Calls(calls(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Calls*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const Call& call : calls(graph)) call();
  return cudaSuccess;
}

}  // extern "C"
