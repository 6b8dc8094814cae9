#pragma once
#include <memory>

#include "core/backend.h"
#include "cuda/run/arena.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

class Queue;
class Replay;

// A problem, and how a device runs it.
class CudaPlan final : public BackendPlan {
 public:
  CudaPlan(const Problem& problem, const PlanDetail& detail, const Device& device);
  ~CudaPlan() override;

  const Problem& problem() const { return problem_; }
  const PlanDetail& detail() const { return detail_; }
  // Queues the run on a stream, without waiting.
  void run(const Buffers& buffers, Workspace workspace, void* stream,
           const Communicator* group) const override;

 private:
  void enqueue(const Buffers& buffers, Workspace workspace, const Queue& queue,
               const Communicator* group) const;

  const Problem problem_;
  const PlanDetail detail_;
  const int device_;
  const std::unique_ptr<Replay> replay_;
};

// Implements Backend::scale.
void scale(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
           void* stream);

// Implement Backend::candidates.
uint64_t candidates_bytes(const Candidates& candidates, const BackendOptions& options);
void candidates(const Candidates& candidates, const BackendOptions& options, Workspace workspace,
                void* stream);

// Implements Backend::divergence.
void divergence(const Divergence& divergence, const BackendOptions& options, void* stream);
// Implements Backend::noise.
void noise(const NoiseLists& lists, const BackendOptions& options, void* stream);

}  // namespace logitless::cuda
