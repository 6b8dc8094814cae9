#pragma once
#include "core/plan.h"
#include "core/problem.h"
#include "cuda/run/float64/arena.h"

namespace logitless::cuda::float64 {

// A problem in float64, and the blocks that its logits are made in. Sums have one order, whatever the blocks:
// every plan gives the same bits.
class Float64Plan final : public BackendPlan {
 public:
  Float64Plan(const Problem& problem, const BlockSize& size, int device)
      : problem_(problem), size_(size), device_(device) {}

  const BlockSize& size() const { return size_; }
  // Queues the run on a stream: waits for nothing.
  void run(const Buffers& buffers, Workspace workspace, void* stream,
           const Communicator* group) const override;

 private:
  const Problem problem_;
  const BlockSize size_;
  [[maybe_unused]] const int device_;  // not in a build without kernels
};

}  // namespace logitless::cuda::float64
