#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

namespace logitless::cuda {

// The work of a run in order, which can be queued repeatedly. Consecutive kernels form a CUDA graph, which
// the host launches in the time of about one kernel. Calls in between are made again.
//
// A recording has room for a few hundred kernels and calls, and throws beyond that: with so many, the device
// takes longer than the host in any case.
//
// Graphs are built node by node. Capturing a stream would do, but during a capture any thread that waits for
// the device gets an error.
class Recording {
 public:
  Recording() { ++alive_; }
  ~Recording() { --alive_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Returns how many recordings exist in this process.
  static int alive() { return alive_; }

  // Recorded forms of Queue's functions.
  void launch(const cudaLaunchConfig_t& config, const void* kernel, void** arguments);
  void clear(void* data, size_t bytes);
  void call(std::function<void(cudaStream_t)> body);

  // Must be called after the last of these, and before the first play().
  void finish();
  // Queues all recorded work on a stream.
  void play(cudaStream_t stream) const;

 private:
  struct Destroy {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
    void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
  };
  struct Step {
    std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> graph;
    std::function<void(cudaStream_t)> call;  // set if there is no graph
  };

  // Adds a node after the last one of the graph under construction.
  template <class Add>
  void add(const Add& node);
  void count();

  static inline std::atomic<int> alive_ = 0;
  std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, Destroy> graph_;  // the kernels since the last call
  cudaGraphNode_t last_ = nullptr;
  std::vector<Step> steps_;
  size_t size_ = 0;
};

}  // namespace logitless::cuda
