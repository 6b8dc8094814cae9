#include "cuda/runtime/recording.h"

#include "cuda/runtime/check.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda {

void Queue::launch(const char* name, cudaLaunchConfig_t config, const void* kernel, void** arguments) const {
  config.stream = stream_;
  if (recording_ != nullptr) {
    recording_->launch(config, kernel, arguments);
  } else {
    cudaLaunchKernelExC(&config, kernel, arguments);
    // Clears the error, which would otherwise be reported for another launch.
    check(cudaGetLastError(), name);
  }
}

void Queue::clear(void* data, size_t bytes) const {
  if (recording_ != nullptr) {
    recording_->clear(data, bytes);
  } else {
    check(cudaMemsetAsync(data, 0, bytes, stream_), "cudaMemsetAsync");
  }
}

void Queue::record(std::function<void(cudaStream_t)> body) const {
  recording_->call(std::move(body));
}

void Recording::count() {
  constexpr size_t kMost = 256;
  if (++size_ > kMost) throw Error(Status::kInternal, "a recording is too long");
}

template <class Add>
void Recording::add(const Add& node) {
  count();
  if (graph_ == nullptr) {
    cudaGraph_t made = nullptr;
    check(cudaGraphCreate(&made, 0), "cudaGraphCreate");
    graph_.reset(made);
    last_ = nullptr;
  }
  cudaGraphNode_t added = nullptr;
  node(&added, graph_.get(), last_ == nullptr ? nullptr : &last_, last_ == nullptr ? size_t{0} : size_t{1});
  last_ = added;
}

void Recording::launch(const cudaLaunchConfig_t& config, const void* kernel, void** arguments) {
  add([&](cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* before, size_t count) {
    cudaKernelNodeParams parameters{};
    parameters.func = const_cast<void*>(kernel);
    parameters.gridDim = config.gridDim;
    parameters.blockDim = config.blockDim;
    parameters.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
    parameters.kernelParams = arguments;
    check(cudaGraphAddKernelNode(node, graph, before, count, &parameters), "cudaGraphAddKernelNode");
    for (unsigned i = 0; i < config.numAttrs; ++i) {
      const cudaLaunchAttribute& attribute = config.attrs[i];
      check(cudaGraphKernelNodeSetAttribute(*node, attribute.id, &attribute.val),
            "cudaGraphKernelNodeSetAttribute");
    }
  });
}

void Recording::clear(void* data, size_t bytes) {
  add([&](cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* before, size_t count) {
    cudaMemsetParams parameters{};
    parameters.dst = data;
    parameters.elementSize = 1;
    parameters.width = bytes;
    parameters.height = 1;
    check(cudaGraphAddMemsetNode(node, graph, before, count, &parameters), "cudaGraphAddMemsetNode");
  });
}

void Recording::call(std::function<void(cudaStream_t)> body) {
  count();
  finish();
  steps_.push_back({nullptr, std::move(body)});
}

void Recording::finish() {
  if (graph_ == nullptr) return;
  cudaGraphExec_t made = nullptr;
  check(cudaGraphInstantiate(&made, graph_.get(), 0), "cudaGraphInstantiate");
  graph_.reset();
  steps_.push_back({});
  steps_.back().graph.reset(made);
}

void Recording::play(cudaStream_t stream) const {
  for (const Step& step : steps_) {
    if (step.graph != nullptr) {
      check(cudaGraphLaunch(step.graph.get(), stream), "cudaGraphLaunch");
    } else {
      step.call(stream);
    }
  }
}

}  // namespace logitless::cuda
