#include "cuda/replay.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cuda/check.h"

namespace headroom::cuda {
namespace {

// The first runs are launched one by one: what comes twice only is not worth a graph.
constexpr int64_t kLaunchedRuns = 2;
// Of so many launches the device takes longer than the host in any case.
constexpr size_t kMostNodes = 256;

bool is_on() {
  const char* graphs = std::getenv("HEADROOM_CUDA_GRAPHS");
  return graphs == nullptr || std::string_view(graphs) != "0";
}

// Calls that other captures forbid may be made in this thread for a scope, and break none.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A stream that only records. Other threads, and this one's other streams, may do what they like.
class Recording {
 public:
  Recording() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  }
  ~Recording() {
    if (graph_ == nullptr) cudaStreamEndCapture(stream_, &graph_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  cudaStream_t stream() const { return stream_; }

  // Null where it has too many launches.
  cudaGraphExec_t finish() {
    check(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    size_t nodes = 0;
    check(cudaGraphGetNodes(graph_, nullptr, &nodes), "cudaGraphGetNodes");
    cudaGraphExec_t made = nullptr;
    if (nodes <= kMostNodes) check(cudaGraphInstantiate(&made, graph_, 0), "cudaGraphInstantiate");
    return made;
  }

 private:
  const RelaxedCaptureMode mode_;
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();
  return true;
}

}  // namespace

Replay::Replay() : records_(is_on()) {}

Replay::~Replay() {
  // What still runs ends in its own time.
  for (const Seen& seen : seen_) {
    if (seen.graph != nullptr) cudaGraphExecDestroy(seen.graph);
  }
}

Replay::Seen& Replay::seen(const RunPointers& pointers) {
  auto at = std::ranges::find(seen_, pointers, &Seen::pointers);
  if (at == seen_.end()) {
    at = std::ranges::min_element(seen_, {}, &Seen::last);
    if (at->graph != nullptr) cudaGraphExecDestroy(at->graph);
    *at = {pointers, 0, 0, nullptr};
  }
  at->last = ++runs_;
  return *at;
}

cudaGraphExec_t Replay::graph_of(const RunPointers& pointers,
                                 const std::function<void(cudaStream_t)>& launches) {
  Seen& now = seen(pointers);
  if (now.graph != nullptr || ++now.times <= kLaunchedRuns) return now.graph;
  try {
    Recording recording;
    launches(recording.stream());
    now.graph = recording.finish();
  } catch (const Error&) {
    cudaGetLastError();  // launches go without
  }
  records_ = now.graph != nullptr;
  return now.graph;
}

void Replay::run(const RunPointers& pointers, cudaStream_t stream,
                 const std::function<void(cudaStream_t)>& launches) {
  // A graph that another thread launches or records at the moment is not waited for.
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock && records_ && !is_capturing(stream)) {
    if (cudaGraphExec_t graph = graph_of(pointers, launches); graph != nullptr) {
      check(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
      return;
    }
  }
  launches(stream);
}

}  // namespace headroom::cuda
