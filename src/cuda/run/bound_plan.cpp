#include "cuda/run/bound_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "core/divergence.h"
#include "core/status.h"
#include "cuda/run/exact/arena.h"
#include "cuda/run/exact/run.h"
#include "cuda/run/runner.h"
#include "cuda/run/sparsified/sparsified.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/replay.h"

namespace logitless::cuda {

CudaPlan::CudaPlan(const Problem& problem, const PlanDetail& detail, const Device& device)
    : problem_(problem), detail_(detail), device_(device.ordinal), replay_(std::make_unique<Replay>()) {}

CudaPlan::~CudaPlan() = default;

void CudaPlan::run(const Buffers& buffers, Workspace workspace, void* stream,
                   const Communicator* group) const {
  const DeviceGuard guard(device_);
  auto* queue_stream = static_cast<cudaStream_t>(stream);
  // Work queued by a group's host cannot be recorded. A group of one exchanges nothing.
  if (group != nullptr && group->size > 1) return enqueue(buffers, workspace, Queue(queue_stream), group);
  const auto work = [&](const Queue& queue) { enqueue(buffers, workspace, queue, nullptr); };
  replay_->run({buffers, workspace.base()}, queue_stream, std::cref(work));
}

namespace {

template <class Real>
RunnerOf<Real> runner_of(const Problem& problem, const Buffers& buffers, const PlanDetail& detail,
                         const ArenaOf<Real>& arena, const Queue& queue, const Communicator* group) {
  const int64_t chunk_rows = std::max<int64_t>(detail.token_chunk, 1);
  const auto* bias = arena.bias != nullptr ? arena.bias : static_cast<const Real*>(buffers.bias);
  return {
      .problem = problem,
      .buffers = buffers,
      .detail = detail,
      .arena = arena,
      .rows = row_inputs<Real>(problem, buffers, arena.joined),
      .transform = logit_transform<Real>(problem, bias, arena.inverse_temperature),
      .queue = queue,
      .chunks = (problem.tokens + chunk_rows - 1) / chunk_rows,
      .products = std::abs(problem.scale) >= double{std::numeric_limits<Real>::min()} && problem.vocab > 0,
      .group = group,
  };
}

// Returns whether d_bias is made at the end of the run, from a sum in the workspace. That is so if no chunk
// of an exact plan writes it.
template <class Real>
bool ends_with_d_bias(const RunnerOf<Real>& run) {
  return run.problem.has.d_bias && (run.problem.tokens == 0 || run.detail.is_sparsified());
}

// Clears d_weight if no product will write it: if there are no rows, or logits do not depend on the matrices.
template <class Real>
void clear_gradients(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  if (p.vocab == 0) return;  // a rank of a group may have no columns
  if (ends_with_d_bias(run)) {
    run.queue.clear(run.arena.d_bias, static_cast<size_t>(p.vocab) * sizeof(Real));
  }
  if (run.products && p.tokens > 0) return;
  if (p.has.d_weight && !p.accumulate.d_weight) {
    launch_zero_rows(run.d_weight(), p.vocab, p.hidden, run.queue);
  }
}

// Stores results that are still in the workspace, at the end of the run.
template <class Real>
void finish_gradients(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  const Buffers& b = run.buffers;
  const ArenaOf<Real>& a = run.arena;
  if (p.has.d_hidden && !p.accumulate.d_hidden && !run.products) {
    launch_zero_rows(run.d_hidden(), p.tokens, p.hidden, run.queue);
  }
  if (a.d_weight != nullptr && run.products && p.tokens > 0) {
    launch_store_matrix(run.padded(a.d_weight, p.stats_dtype()), run.d_weight(), p.vocab, p.hidden,
                        p.accumulate.d_weight, run.queue);
  }
  if (ends_with_d_bias(run) && p.vocab > 0) {
    launch_store_vector(a.d_bias, p.vocab, run.bias_gradient_scale(), b.d_bias, p.dtype.d_bias,
                        p.accumulate.d_bias, run.queue);
  }
}

// Runs the steps before and after those of exact and sparsified plans.
template <class Real, class Middle>
void run_around(const RunnerOf<Real>& run, const Middle& middle) {
  const Problem& problem = run.problem;
  if (problem.needs_backward()) clear_gradients(run);
  if (problem.targets_per_row > 0) launch_join_targets(run.rows, run.arena.joined, run.queue);
  launch_prepare_rows(run.rows, run.arena, std::max<int64_t>(run.detail.token_chunk, 1), run.compacts_rows(),
                      problem.needs_forward(), run.buffers, run.queue);
  if (problem.tokens > 0 && problem.vocab > 0) load_whole_weight(run);
  middle(run);
  if (problem.tokens == 0 && problem.needs_forward()) {  // the loss of no rows
    finish_chunk(run, {.row_count = run.arena.chunk_rows}, {}, false);
  }
  if (problem.needs_backward()) finish_gradients(run);
}

}  // namespace

void CudaPlan::enqueue(const Buffers& buffers, Workspace workspace, const Queue& queue,
                       const Communicator* group) const {
  const auto runner = [&](const auto& arena) {
    return runner_of(problem_, buffers, detail_, arena, queue, group);
  };
  if (detail_.is_sparsified()) {
    const SparsifiedArena arena = lay_out_sparsified(problem_, detail_, workspace, buffers.saved);
    run_around(runner(arena.base), [&](const Runner& run) { run_sparsified(run, arena); });
    return;
  }
  Workspace saved(buffers.saved);
  if (problem_.stats_dtype() == DType::kF64) {
    run_around(runner(lay_out_exact<double>(problem_, detail_, workspace, saved)), run_exact<double>);
  } else {
    run_around(runner(lay_out_exact<float>(problem_, detail_, workspace, saved)), run_exact<float>);
  }
}

void scale(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
           void* stream) {
  const DeviceGuard guard(options.device);
  launch_scale_unless_one(arrays, factor, static_cast<cudaStream_t>(stream));
}

void divergence(const Divergence& d, const BackendOptions& options, void* stream) {
  if (d.rows > std::numeric_limits<int32_t>::max()) {
    throw_invalid("rows", "at most 2^31 - 1", std::to_string(d.rows));
  }
  const DeviceGuard guard(options.device);
  launch_divergence(d, static_cast<cudaStream_t>(stream));
}

void noise(const NoiseLists& lists, const BackendOptions& options, void* stream) {
  const DeviceGuard guard(options.device);
  launch_noise(lists, static_cast<cudaStream_t>(stream));
}

}  // namespace logitless::cuda
