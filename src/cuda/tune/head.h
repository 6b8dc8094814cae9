#pragma once
#include "core/buffers.h"
#include "core/plan.h"
#include "core/problem.h"
#include "cuda/engines/engine.h"
#include "cuda/tune/device_work.h"

namespace logitless::cuda {

struct HeadSizes {
  int64_t tokens = 0, vocab = 0, hidden = 0;
};

// A head of random numbers on the calling thread's device, equal for equal sizes and dtypes, and runs of it.
// Its logits have a standard deviation of 1. Everything throws Error.
class Head {
 public:
  static constexpr int64_t kTop = 5, kSamples = 2;

  Head(const HeadSizes& sizes, DType dtype, const Device& device, cudaStream_t stream);

  // The problem of a kind of work, to which a caller may add options. Rows have room for kTop largest logits
  // and kSamples samples.
  Problem problem(Work work) const;
  struct Planned {
    Plan plan;
    Buffers buffers;
  };
  // Makes an engine's plan by default, or the one with the smallest workspace. All plans of a head share its
  // outputs and a workspace.
  Planned plan(const Problem& problem, const Engine& engine, bool smallest = false);
  void run(const Planned& planned) const;
  const HeadSizes& sizes() const { return sizes_; }

 private:
  const HeadSizes sizes_;
  const DType dtype_;
  const Device& device_;
  const cudaStream_t stream_;
  DeviceMemory hidden_, weight_, targets_, d_hidden_, d_weight_, loss_, lse_, top_ids_, top_log_probs_,
      sampled_keys_;
  DeviceMemory workspace_;
  uint64_t workspace_bytes_ = 0;
};

}  // namespace logitless::cuda
