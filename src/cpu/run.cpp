#include "cpu/run.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/targets.h"
#include "cpu/isa.h"
#include "cpu/runner.h"
#include "cpu/thinned/run.h"

namespace headroom::cpu {
namespace {

void run_chunk(const Runner& run, const HostLoss& loss, HostLossWriter& writer, const Chunk& chunk) {
  load_chunk(run, chunk);
  if (run.problem.needs_forward()) {
    forward_chunk(run, chunk);
    for (int64_t i = 0; i < chunk.count; ++i) {
      writer.add(run.arena.rows[static_cast<size_t>(chunk.first + i)],
                 run.arena.stats[static_cast<size_t>(i)]);
    }
  }
  if (run.problem.needs_backward()) {
    load_coefficients(run, loss, chunk);
    if (run.problem.has_gradients()) backward_chunk(run, chunk);
  }
}

void run_exact(const Runner& run, const HostLoss& loss) {
  std::fill(run.arena.d_bias.begin(), run.arena.d_bias.end(), 0.0f);
  HostLossWriter writer(loss);
  if (sweeps_vocabulary(run.plan)) {
    Problem rows_only = run.problem;
    rows_only.want_d_classifier = rows_only.want_d_bias = false;
    forget_packed_blocks(rows_of(run, rows_only, {}));
    for_chunks(run,
               [&](const Chunk& chunk) { run_chunk(rows_of(run, rows_only, chunk), loss, writer, chunk); });
    sweep_vocabulary(run);
  } else {
    forget_packed_blocks(run);
    for_chunks(run, [&](const Chunk& chunk) { run_chunk(run, loss, writer, chunk); });
  }
  if (run.problem.needs_forward()) writer.finish();
  if (run.problem.want_d_classifier && run.row_count == 0) zero_d_classifier(run);
  if (run.problem.want_d_bias) store_d_bias(run);
}

}  // namespace

void run(const Problem& problem, const Plan& plan, const Buffers& buffers, Workspace workspace,
         const BackendOptions& options, void* /*stream*/) {
  const Kernels& kernels = select_kernels(problem, options.isa);
  const Shape shape = make_shape(problem, kernels);
  Problem work = problem;
  Arena arena = lay_out(problem, kernels, shape, plan, workspace);
  if (problem.is_thinned() && problem.keeps_draws) {
    Workspace draws(buffers.draws);
    arena.thinned.draws = lay_out_draws(problem, shape, draws);
  }
  // 1 / scale must be a float, for the bias' gradient.
  if (std::abs(problem.scale) < std::numeric_limits<float>::min()) work.scale = 0;
  if (work.scale == 0) {  // logits do not depend on the matrices: only the bias can have a gradient
    work.want_d_hidden = false;
    work.want_d_classifier = false;
  }
  const int64_t row_count = compact_rows(problem, buffers.targets, arena.rows.data());
  const Runner run{work, buffers, plan, kernels, options.parallel_for, shape, arena, row_count};
  const HostLoss loss = make_host_loss(problem, buffers, arena.rows.data(), row_count);
  if (problem.needs_forward()) write_ignored_defaults(problem, buffers);
  if (problem.is_thinned()) {
    forget_packed_blocks(run);
    run_thinned(run, loss);
  } else {
    run_exact(run, loss);
  }
  if (problem.want_d_hidden) zero_d_hidden(run, work.want_d_hidden);
  if (problem.want_d_classifier && !work.want_d_classifier) zero_d_classifier(run);
}

}  // namespace headroom::cpu
