#include "cuda/tune/head.h"

#include <cmath>

#include "core/validate.h"
#include "cuda/plan/plans.h"

namespace logitless::cuda {

Head::Head(const HeadSizes& sizes, DType dtype, const Device& device, cudaStream_t stream)
    : sizes_(sizes), dtype_(dtype), device_(device), stream_(stream) {
  const auto bytes = [](int64_t count, size_t size) {
    return DeviceMemory(static_cast<size_t>(count) * size);
  };
  const auto& [tokens, vocab, hidden] = sizes;
  hidden_ = bytes(tokens * hidden, size_of(dtype));
  weight_ = bytes(vocab * hidden, size_of(dtype));
  targets_ = bytes(tokens, sizeof(int32_t));
  d_hidden_ = bytes(tokens * hidden, size_of(dtype));
  d_weight_ = bytes(vocab * hidden, size_of(dtype));
  loss_ = bytes(1, sizeof(float));
  lse_ = bytes(tokens, sizeof(float));
  top_ids_ = bytes(tokens * kTop, sizeof(int64_t));
  top_log_probs_ = bytes(tokens * kTop, sizeof(float));
  sampled_keys_ = bytes(tokens * kSamples, sizeof(float));
  launch_fill(hidden_.get(), dtype, tokens * hidden, 1, 1, stream);
  launch_fill(weight_.get(), dtype, vocab * hidden, 1 / std::sqrt(static_cast<double>(hidden)), 2, stream);
  launch_fill_targets(static_cast<int32_t*>(targets_.get()), tokens, vocab, stream);
}

Problem Head::problem(Work work) const {
  Problem p;
  p.tokens = sizes_.tokens;
  p.vocab = sizes_.vocab;
  p.hidden = sizes_.hidden;
  p.dtype.hidden = p.dtype.weight = p.dtype.d_hidden = p.dtype.d_weight = dtype_;
  p.dtype.targets = DType::kI32;
  p.pass = work == Work::kLoss ? Pass::kForward : Pass::kForwardBackward;
  p.has.d_hidden = p.has.d_weight = work != Work::kLoss;
  // Always, as the exact plans are measured as exact work.
  if (work == Work::kSparsified) p.gradient = GradientMethod::kAlwaysSparsified;
  return p;
}

Head::Planned Head::plan(const Problem& problem, const Engine& engine, bool smallest) {
  const Problem valid = validated(problem);
  const auto within = [&](uint64_t budget) { return search_plans(valid, device_, {&engine, ""}, budget); };
  const Plan chosen = smallest ? within(1).back() : chosen_plan(valid, within, /*budget=*/0);
  if (chosen.workspace_bytes > workspace_bytes_) {
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    workspace_bytes_ = 0;
    workspace_ = DeviceMemory();  // first, so that both need not fit
    workspace_ = DeviceMemory(chosen.workspace_bytes);
    workspace_bytes_ = chosen.workspace_bytes;
  }
  Buffers b;
  b.hidden = hidden_.get();
  b.weight = weight_.get();
  b.targets = targets_.get();
  b.loss = loss_.get();
  b.lse = lse_.get();
  if (valid.needs_backward()) {
    b.d_hidden = d_hidden_.get();
    b.d_weight = d_weight_.get();
  }
  if (allows_top_ids(valid)) {
    b.top_ids = static_cast<int64_t*>(top_ids_.get());
    b.top_log_probs = top_log_probs_.get();
  }
  if (allows_sampled_keys(valid)) b.sampled_keys = sampled_keys_.get();
  return {chosen, validated(valid, b)};
}

void Head::run(const Planned& planned) const {
  planned.plan.backend_plan->run(planned.buffers, Workspace(workspace_.get()), stream_, nullptr);
}

}  // namespace logitless::cuda
