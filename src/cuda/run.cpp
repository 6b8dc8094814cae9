#include "cuda/run.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/device.h"
#include "cuda/float64/kernels.h"
#include "cuda/float64/run.h"
#include "cuda/runner.h"
#include "cuda/thinned/run.h"

namespace headroom::cuda {
namespace {

void run_chunk(const Runner& run, const Chunk& chunk) {
  const Operand hidden = load_hidden(run, chunk);
  const bool kept = run.detail.kept_columns > 0, all_kept = run.detail.kept_columns == run.problem.vocab;
  if (run.problem.needs_forward()) {
    if (kept) {
      keep_exps(run, chunk, hidden);
    } else {
      sum_rows(run, chunk, hidden, run.detail.source == HiddenSource::kCaller ? run.arena.active : nullptr);
    }
    launch_finish_rows(run.rows, run.arena, run.buffers,
                       {chunk.first, chunk.rows, chunk.row_count, kept, tracks_max(run),
                        run.detail.implementation == Implementation::kSm90, run.problem.is_shard()},
                       run.stream);
  }
  if (!run.problem.needs_backward()) return;
  load_coefficients(run, chunk);
  if (kept) gradients_of_exps(run, chunk, hidden);
  if (kept && !all_kept) rescale_for_lse(run, chunk);
  if (!all_kept) gradients_of_lse(run, chunk, hidden);
  store_d_hidden(run, chunk, all_kept ? run.arena.row_factor : nullptr);
}

}  // namespace

void run(const Problem& problem, const Plan& plan, const Buffers& buffers, Workspace workspace,
         const BackendOptions& options, void* stream) {
  const DeviceGuard guard(options.device);
  if (problem.hidden_dtype == DType::kF64) {
    float64::run(problem, plan, buffers, workspace, static_cast<cudaStream_t>(stream));
    return;
  }
  const int64_t chunk_rows = std::max<int64_t>(plan.token_chunk, 1);
  Workspace rows_workspace = workspace;  // a layout takes from it
  const Runner run{problem,
                   plan,
                   buffers,
                   PlanDetail::load(plan),
                   lay_out(problem, plan, rows_workspace, buffers.draws),
                   row_inputs(problem, buffers),
                   static_cast<cudaStream_t>(stream),
                   (problem.tokens + chunk_rows - 1) / chunk_rows,
                   std::abs(problem.scale) >= double{std::numeric_limits<float>::min()}};
  const bool thinned = plan.kind == PlanKind::kThinned;
  const bool compact = run.detail.source != HiddenSource::kCaller && !thinned;
  launch_prepare_rows(run.rows, run.arena, chunk_rows, compact, buffers.valid_count, buffers.invalid_targets,
                      run.stream);
  if (problem.needs_forward() && problem.tokens > 0) launch_fill_ignored(run.rows, buffers, run.stream);
  if (!thinned && problem.tokens > 0 && (buffers.kept_count != nullptr || buffers.draw_variance != nullptr)) {
    launch_exact_draw_stats(run.rows, problem.vocab, buffers, run.stream);
  }
  if (problem.needs_backward()) clear_gradients(run);
  load_bias(run);
  if (thinned) run_thinned(run, workspace);
  // The last chunk first: a computed row never comes from an earlier row of the caller's, so what is written
  // to the rows of d_hidden lies past the copies that later chunks make there (HiddenSource::kOutput).
  for (int64_t i = thinned ? -1 : run.chunks - 1; i >= 0; --i) {
    const int64_t first = i * chunk_rows;
    run_chunk(run, {i + 1 == run.chunks, first, std::min(chunk_rows, problem.tokens - first),
                    run.arena.chunk_rows + i});
  }
  if (problem.needs_forward() && !problem.is_shard()) {
    launch_finish_loss(run.rows, run.arena, buffers, run.stream);
  }
  if (problem.needs_backward()) finish_gradients(run);
}

void scale(void* data, DType dtype, int64_t count, const void* factor, const BackendOptions& options,
           void* stream) {
  const DeviceGuard guard(options.device);
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == DType::kF64) {
    float64::launch_scale_unless_one(static_cast<double*>(data), count, static_cast<const double*>(factor),
                                     queue);
  } else {
    launch_scale_unless_one(data, dtype, count, static_cast<const float*>(factor), queue);
  }
}

}  // namespace headroom::cuda
