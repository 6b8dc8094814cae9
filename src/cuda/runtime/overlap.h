#pragma once
#include <array>
#include <memory>

#include "cuda/runtime/queue.h"

namespace logitless::cuda {

// Runs blocks of two steps each, so that they overlap: a product, and row kernels that use its result. Row
// kernels run in order on a stream of higher priority. Products run on the queue's own stream, or take turns
// on it and another one; then the first tiles of one fill processors that the last tiles of another leave
// idle. The queue waits for all of it at the end. Results go to kBuffers buffers in turn.
//
// If the queue is being captured, or with no product streams, all steps go to the queue in turn. A recording
// has only one stream, so it fails with an error and the run is not recorded.
class Overlap {
 public:
  static constexpr int kBuffers = 3;
  static constexpr int kMostProductStreams = 2;

  // product_streams: 0 to kMostProductStreams.
  Overlap(const Queue& queue, int product_streams);
  ~Overlap();
  Overlap(const Overlap&) = delete;
  Overlap& operator=(const Overlap&) = delete;

  // Begins a block. products() then waits until the block's buffer is no longer used.
  void begin_block();
  // Ends its products: later work in rows() waits for them.
  void end_products() const;
  // Ends its row kernels, and the block.
  void end_rows();

  int64_t block() const { return block_; }  // counted from 0
  int product_stream() const { return static_cast<int>(block_ % product_streams_); }
  const Queue& products() const { return product_stream() == 0 ? first_ : second_; }
  const Queue& rows() const { return rows_; }

 private:
  struct Side;
  class Pool;

  const int product_streams_;
  const Queue& first_;
  std::unique_ptr<Side> side_;
  Queue second_, rows_;
  int64_t block_ = 0;
};

}  // namespace logitless::cuda
