#include "cuda/runtime/overlap.h"

#include <algorithm>
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
    check(cudaStreamCreateWithPriority(&products, cudaStreamNonBlocking, least),
          "cudaStreamCreateWithPriority");
    check(cudaStreamCreateWithPriority(&rows, cudaStreamNonBlocking, greatest),
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
    for (cudaStream_t stream : {products, rows}) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }

  // Makes `to` wait for the work of `from` so far.
  void wait(cudaStream_t to, cudaStream_t from) const {
    check(cudaEventRecord(events[0], from), "cudaEventRecord");
    check(cudaStreamWaitEvent(to, events[0], 0), "cudaStreamWaitEvent");
  }
  // The event of the row kernels that use a buffer.
  cudaEvent_t rows_of(int64_t block) const { return events[static_cast<size_t>(1 + block % kBuffers)]; }

  cudaStream_t products = nullptr, rows = nullptr;
  std::array<cudaEvent_t, 1 + kBuffers> events{};
  Place place;
};

// Idle streams, by the stream that they served. Runs on different streams never share one, so they do not
// wait for each other.
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

Overlap::Overlap(const Queue& queue, int product_streams)
    : product_streams_(std::max(product_streams, 1)), first_(queue), second_(queue), rows_(queue) {
  if (product_streams == 0) return;
  if (queue.records()) throw Error(Status::kInternal, "a recording has one stream");
  if (is_capturing(queue.stream())) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  side_ = Pool::instance().take({device, queue.stream()});
  second_ = Queue(side_->products);
  rows_ = Queue(side_->rows);
  side_->wait(side_->products, first_.stream());
}

Overlap::~Overlap() {
  if (side_ == nullptr) return;
  // Errors are ignored here: the caller gets those of the work itself.
  for (cudaStream_t stream : {side_->products, side_->rows}) {
    cudaEventRecord(side_->events[0], stream);
    cudaStreamWaitEvent(first_.stream(), side_->events[0], 0);
  }
  Pool::instance().give_back(std::move(side_));
}

void Overlap::begin_block() {
  if (side_ == nullptr || block_ < kBuffers) return;
  check(cudaStreamWaitEvent(products().stream(), side_->rows_of(block_), 0), "cudaStreamWaitEvent");
}

void Overlap::end_products() const {
  if (side_ != nullptr) side_->wait(side_->rows, products().stream());
}

void Overlap::end_rows() {
  if (side_ != nullptr) check(cudaEventRecord(side_->rows_of(block_), side_->rows), "cudaEventRecord");
  ++block_;
}

}  // namespace logitless::cuda
