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
#include "cuda/run/thinned/run.h"
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
  // What a group's host queues is no part of a recording. A group of one has nobody to exchange with.
  if (group != nullptr && group->size > 1) return put(buffers, workspace, Queue(queue_stream), group);
  const auto work = [&](const Queue& queue) { put(buffers, workspace, queue, nullptr); };
  replay_->run({buffers, workspace.base()}, queue_stream, std::cref(work));
}

void CudaPlan::put(const Buffers& buffers, Workspace workspace, const Queue& queue,
                   const Communicator* group) const {
  const Problem& problem = problem_;
  const int64_t chunk_rows = std::max<int64_t>(detail_.token_chunk, 1);
  const bool thinned = detail_.is_thinned();
  const ThinArena thin = thinned ? lay_out_thinned(problem, detail_, workspace, buffers.draws) : ThinArena{};
  const Arena arena = thinned ? thin.base : lay_out_exact(problem, detail_, workspace);
  const Runner run{
      .problem = problem,
      .buffers = buffers,
      .detail = detail_,
      .arena = arena,
      .rows = with_joined(row_inputs(problem, buffers), arena.joined),
      .transform = logit_transform<float>(
          problem, arena.bias != nullptr ? arena.bias : static_cast<const float*>(buffers.bias),
          arena.inverse_temperature),
      .queue = queue,
      .chunks = (problem.tokens + chunk_rows - 1) / chunk_rows,
      .products = std::abs(problem.scale) >= double{std::numeric_limits<float>::min()} && problem.vocab > 0,
      .group = group,
  };
  const bool compact = run.detail.source != HiddenSource::kCaller && !thinned;
  if (problem.needs_backward()) clear_gradients(run);
  if (problem.targets_per_row > 0) {
    launch_join_targets(run.rows, buffers.target_weight, DType::kF32, arena.joined, run.queue);
  }
  launch_prepare_rows(run.rows, run.arena, chunk_rows, compact, problem.needs_forward(), buffers, run.queue);
  if (problem.tokens > 0 && problem.vocab > 0) load_whole_classifier(run);
  if (thinned) {
    run_thinned(run, thin);
  } else {
    run_exact(run);
  }
  if (problem.tokens == 0 && problem.needs_forward()) {  // the loss of no rows
    finish_chunk(run, {.row_count = run.arena.chunk_rows}, {}, false);
  }
  if (problem.needs_backward()) finish_gradients(run);
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

}  // namespace logitless::cuda
