#pragma once
#include <array>
#include <memory>

#include "cuda/runtime/queue.h"

namespace logitless::cuda {

// Work of two kinds on two streams, so that one kind runs beside the other: on a queue's own stream, and on a
// second one of higher priority, which the queue waits for at the end. Where the queue is captured, or where
// is_wanted is false, both kinds go to the queue, in turn. A recording has one stream and is given up.
class Overlap {
 public:
  static constexpr int kBuffers = 3;

  Overlap(const Queue& queue, bool is_wanted);
  ~Overlap();
  Overlap(const Overlap&) = delete;
  Overlap& operator=(const Overlap&) = delete;

  const Queue& first() const { return first_; }
  const Queue& second() const { return second_; }
  // The second's later work comes after all that the first has been given.
  void second_waits() const;
  // The first's later work comes after the second's up to the mark, one for each of kBuffers buffers that
  // take turns. There is none at first.
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
