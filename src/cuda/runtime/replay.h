#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "core/buffers.h"
#include "cuda/runtime/queue.h"
#include "cuda/runtime/recording.h"

namespace logitless::cuda {

// The inputs that determine the launches of a plan's runs.
struct RunPointers {
  Buffers buffers;
  const void* workspace = nullptr;

  bool operator==(const RunPointers&) const = default;
};

// Repeats recurring runs. The steps of a training usually have the same pointers. From the third run with the
// same pointers on, a recording of the run is played. It has the kernels and the order of the run, so results
// do not depend on it. A process has at most 256 recordings; later runs are queued as they are.
//
// LOGITLESS_CUDA_GRAPHS=0, read when a plan is made, turns recordings off.
class Replay {
 public:
  Replay();

  // Queues the work that `work` adds to its queue. `stream` must belong to the calling thread's device.
  void run(const RunPointers& pointers, cudaStream_t stream, const std::function<void(const Queue&)>& work);

 private:
  struct Seen {
    RunPointers pointers;
    int64_t times = 0;
    int64_t last = 0;  // number of the run that used it last
    std::unique_ptr<const Recording> recording;
  };

  // Returns null if these pointers have no recording yet.
  const Recording* recording_of(const RunPointers& pointers, const std::function<void(const Queue&)>& work);
  Seen& seen(const RunPointers& pointers);

  std::mutex mutex_;
  bool records_;
  int64_t runs_ = 0;
  std::array<Seen, 4> seen_;  // a few, for micro-batches and buffers that take turns
};

}  // namespace logitless::cuda
