#include "cuda/runtime/overlap.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/runtime/captures.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

using Place = std::pair<int, cudaStream_t>;  // a device and one of its streams

}  // namespace

struct Overlap::Side {
  Side() {
    const BesideCaptures beside_captures;
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
          "cudaStreamCreateWithPriority");
    for (cudaEvent_t& event : events) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  ~Side() {
    for (cudaEvent_t event : events) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  cudaStream_t stream = nullptr;
  std::array<cudaEvent_t, 1 + kBuffers> events{};  // one of the first stream, then the second's marks
  Place place;
};

// Idle second streams, by the stream that they served. Runs on different streams never share one, so they do
// not wait for each other.
class Overlap::Pool {
 public:
  static Pool& instance() {
    static Pool* const kept = new Pool;  // outlives the driver's own teardown
    return *kept;
  }
  std::unique_ptr<Side> take(const Place& place) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<std::unique_ptr<Side>>& idle = idle_[place];
      if (!idle.empty()) {
        std::unique_ptr<Side> side = std::move(idle.back());
        idle.pop_back();
        return side;
      }
    }
    auto side = std::make_unique<Side>();
    side->place = place;
    return side;
  }
  void give_back(std::unique_ptr<Side> side) {
    const std::lock_guard lock(mutex_);
    idle_[side->place].push_back(std::move(side));
  }

 private:
  std::mutex mutex_;
  std::map<Place, std::vector<std::unique_ptr<Side>>> idle_;
};

Overlap::Overlap(const Queue& queue, bool is_wanted) : first_(queue), second_(queue) {
  if (!is_wanted) return;
  if (queue.records()) throw Error(Status::kInternal, "a recording has one stream");
  if (is_capturing(queue.stream())) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  side_ = Pool::instance().take({device, queue.stream()});
  second_ = Queue(side_->stream);
  second_waits();
}

Overlap::~Overlap() {
  if (side_ == nullptr) return;
  // Errors are ignored here: the caller gets those of the work itself.
  cudaEventRecord(side_->events[1], side_->stream);
  cudaStreamWaitEvent(first_.stream(), side_->events[1], 0);
  Pool::instance().give_back(std::move(side_));
}

void Overlap::second_waits() const {
  if (side_ == nullptr) return;
  check(cudaEventRecord(side_->events[0], first_.stream()), "cudaEventRecord");
  check(cudaStreamWaitEvent(side_->stream, side_->events[0], 0), "cudaStreamWaitEvent");
}

void Overlap::mark_second(int buffer) const {
  if (side_ == nullptr) return;
  check(cudaEventRecord(side_->events[static_cast<size_t>(1 + buffer)], side_->stream), "cudaEventRecord");
}

void Overlap::first_waits_for_mark(int buffer) const {
  if (side_ == nullptr) return;
  check(cudaStreamWaitEvent(first_.stream(), side_->events[static_cast<size_t>(1 + buffer)], 0),
        "cudaStreamWaitEvent");
}

}  // namespace logitless::cuda
