#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>

#include "core/buffers.h"

namespace headroom::cuda {

// What the launches of a plan's runs depend on.
struct RunPointers {
  Buffers buffers;
  const void* workspace = nullptr;

  bool operator==(const RunPointers&) const = default;
};

// Repeats runs that come again. The steps of a training have the same pointers as a rule: launches of
// pointers that were seen before are recorded as a CUDA graph, and from then on queued at once, for the
// host's time of about one. A graph has the kernels and the order of the launches, so nothing that a run
// computes depends on it.
//
// HEADROOM_CUDA_GRAPHS=0 turns it off.
class Replay {
 public:
  Replay();
  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Queues on `stream`, of the calling thread's device, what `launches` queues on the stream that it is
  // given.
  void run(const RunPointers& pointers, cudaStream_t stream,
           const std::function<void(cudaStream_t)>& launches);

 private:
  struct Seen {
    RunPointers pointers;
    int64_t times = 0;
    int64_t last = 0;  // which run it was
    cudaGraphExec_t graph = nullptr;
  };

  // Null unless the launches of these pointers are recorded, by now.
  cudaGraphExec_t graph_of(const RunPointers& pointers, const std::function<void(cudaStream_t)>& launches);
  Seen& seen(const RunPointers& pointers);

  std::mutex mutex_;
  bool records_;
  int64_t runs_ = 0;
  std::array<Seen, 4> seen_;  // micro-batches and buffers that take turns
};

}  // namespace headroom::cuda
