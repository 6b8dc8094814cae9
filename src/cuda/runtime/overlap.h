#pragma once
#include <array>
#include <memory>

#include "cuda/runtime/queue.h"

namespace logitless::cuda {

// Runs two kinds of work on two streams, so that they overlap: on a queue's own stream, and on a second one
// of higher priority. The queue waits for the second stream at the end.
//
// If the queue is being captured, or if is_wanted is false, both kinds go to the queue in turn. A recording
// has only one stream, so it fails with an error and the run is not recorded.
class Overlap {
 public:
  static constexpr int kBuffers = 3;

  Overlap(const Queue& queue, bool is_wanted);
  ~Overlap();
  Overlap(const Overlap&) = delete;
  Overlap& operator=(const Overlap&) = delete;

  const Queue& first() const { return first_; }
  const Queue& second() const { return second_; }
  // Makes the second's later work wait for all work given to the first so far.
  void second_waits() const;
  // mark_second() marks a point in the second's work, one for each of kBuffers buffers that take turns.
  // first_waits_for_mark() makes the first's later work wait for that point. Without a mark it does not wait.
  void mark_second(int buffer) const;
  void first_waits_for_mark(int buffer) const;

 private:
  struct Side;
  class Pool;

  const Queue& first_;
  std::unique_ptr<Side> side_;
  Queue second_;
};

}  // namespace logitless::cuda
