#include "cuda/run.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cuda/device.h"
#include "cuda/replay.h"
#include "cuda/runner.h"
#include "cuda/thinned/run.h"

namespace headroom::cuda {
namespace {

void run_chunk(const Runner& run, const Chunk& chunk) {
  const bool kept = run.detail.kept_columns > 0, all_kept = run.detail.kept_columns == run.problem.vocab;
  const Operand hidden = load_rows(run, chunk, /*wants_target_logits=*/kept && run.traits().anchors_first);
  if (run.problem.needs_forward()) {
    if (kept) {
      keep_exps(run, chunk, hidden);
    } else {
      sum_rows(run, chunk, hidden, run.detail.source == HiddenSource::kCaller ? run.arena.active : nullptr);
    }
  }
  finish_chunk(run, chunk, hidden, kept);
  if (!run.problem.needs_backward()) return;
  if (kept) gradients_of_exps(run, chunk, hidden);
  if (kept && !all_kept) rescale_for_lse(run, chunk);
  if (!all_kept) gradients_of_lse(run, chunk, hidden);
  store_d_hidden(run, chunk, all_kept ? run.arena.row_factor : nullptr);
}

}  // namespace

size_t workspace_bytes(const Problem& problem, const PlanDetail& detail) {
  Workspace counter;
  if (detail.is_thinned()) {
    lay_out_thinned(problem, detail, counter, nullptr);
  } else {
    lay_out(problem, detail, counter);
  }
  return counter.used();
}

CudaPlan::CudaPlan(const Problem& problem, const PlanDetail& detail, const Device& device)
    : problem_(problem),
      detail_(detail),
      device_(device.ordinal),
      capability_(device.capability),
      replay_(std::make_unique<Replay>()) {}

CudaPlan::~CudaPlan() = default;

void CudaPlan::run(const Buffers& buffers, Workspace workspace, void* stream) const {
  const DeviceGuard guard(device_);
  const auto work = [&](const Queue& queue) { put(buffers, workspace, queue); };
  replay_->run({buffers, workspace.base()}, static_cast<cudaStream_t>(stream), std::cref(work));
}

void CudaPlan::put(const Buffers& buffers, Workspace workspace, const Queue& queue) const {
  const Problem& problem = problem_;
  const int64_t chunk_rows = std::max<int64_t>(detail_.token_chunk, 1);
  const bool thinned = detail_.is_thinned();
  const ThinArena thin = thinned ? lay_out_thinned(problem, detail_, workspace, buffers.draws) : ThinArena{};
  const Runner run{problem,
                   buffers,
                   detail_,
                   thinned ? thin.base : lay_out(problem, detail_, workspace),
                   row_inputs(problem, buffers),
                   queue,
                   (problem.tokens + chunk_rows - 1) / chunk_rows,
                   std::abs(problem.scale) >= double{std::numeric_limits<float>::min()},
                   capability_ >= 90 ? After::kKernel : After::kAnything};
  const bool compact = run.detail.source != HiddenSource::kCaller && !thinned;
  if (problem.needs_backward()) clear_gradients(run);
  launch_prepare_rows(run.rows, run.arena, chunk_rows, compact, problem.needs_forward(), buffers, run.queue);
  if (problem.tokens > 0) load_whole_classifier(run);
  if (thinned) {
    run_thinned(run, thin);
  } else if (problem.tokens > 0 && (buffers.kept_count != nullptr || buffers.draw_variance != nullptr)) {
    launch_exact_draw_stats(run.rows, problem.vocab, buffers, run.queue);
  }
  // The last chunk first: a computed row never comes from an earlier row of the caller's, so what is written
  // to the rows of d_hidden lies past the copies that later chunks make there (HiddenSource::kOutput).
  for (int64_t i = thinned ? -1 : run.chunks - 1; i >= 0; --i) {
    const int64_t first = i * chunk_rows;
    run_chunk(run, {i + 1 == run.chunks, i == 0, first, std::min(chunk_rows, problem.tokens - first),
                    run.arena.chunk_rows + i});
  }
  if (problem.tokens == 0 && problem.needs_forward()) {  // the loss of no rows
    finish_chunk(run, {true, true, 0, 0, run.arena.chunk_rows}, {}, false);
  }
  if (problem.needs_backward()) finish_gradients(run);
}

void scale(std::span<const GradientArray> arrays, const void* factor, const BackendOptions& options,
           void* stream) {
  const DeviceGuard guard(options.device);
  launch_scale_unless_one(arrays, factor, static_cast<cudaStream_t>(stream));
}

}  // namespace headroom::cuda
