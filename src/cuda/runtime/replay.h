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

// What the launches of a plan's runs depend on.
struct RunPointers {
  Buffers buffers;
  const void* workspace = nullptr;

  bool operator==(const RunPointers&) const = default;
};

// Repeats runs that come again. The steps of a training have the same pointers as a rule: from the third run
// with the same ones on, a recording of it is played. It has the kernels and the order of the run, so nothing
// that is computed depends on it. A process has 256 recordings at most; what comes then is queued as it is.
//
// LOGITLESS_CUDA_GRAPHS=0, when a plan is made, turns it off.
class Replay {
 public:
  Replay();

  // Queues on `stream`, of the calling thread's device, what `work` puts into the queue that it is given.
  void run(const RunPointers& pointers, cudaStream_t stream, const std::function<void(const Queue&)>& work);

 private:
  struct Seen {
    RunPointers pointers;
    int64_t times = 0;
    int64_t last = 0;  // which run it was
    std::unique_ptr<const Recording> recording;
  };

  // Null where these pointers have no recording yet.
  const Recording* recording_of(const RunPointers& pointers, const std::function<void(const Queue&)>& work);
  Seen& seen(const RunPointers& pointers);

  std::mutex mutex_;
  bool records_;
  int64_t runs_ = 0;
  std::array<Seen, 4> seen_;  // micro-batches and buffers that take turns
};

}  // namespace logitless::cuda
