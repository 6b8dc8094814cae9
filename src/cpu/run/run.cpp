#include "cpu/run/run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/group_stats.h"
#include "core/targets.h"
#include "cpu/run/stages.h"
#include "cpu/thinned/run.h"

namespace logitless::cpu {
namespace {

// Losses and row coefficients, between the passes.
class RowStage {
 public:
  RowStage(const Runner& run, const Chunk& chunk, const HostLoss& loss, HostLossWriter& writer,
           TaskGroups& groups, TaskGroups::Id rows, TaskGroups::Id stats)
      : run_(run), chunk_(chunk), loss_(loss), writer_(writer) {
    const Problem& p = run.problem;
    groups.add(p.needs_forward() ? 1 : 0, {stats}, TaskBody::of<&RowStage::write>(*this));
    coefficients_ = groups.add(p.needs_backward() ? row_tasks(chunk.count) : 0, {rows, stats},
                               TaskBody::of<&RowStage::load>(*this));
  }
  TaskGroups::Id coefficients() const { return coefficients_; }

 private:
  void write(int64_t, int64_t, int) const { write_losses(run_, chunk_, writer_); }
  void load(int64_t, int64_t task, int) const {
    load_coefficients(run_, loss_, chunk_, task * kTaskRows, std::min(chunk_.count, (task + 1) * kTaskRows));
  }

  const Runner& run_;
  const Chunk& chunk_;
  const HostLoss& loss_;
  HostLossWriter& writer_;
  TaskGroups::Id coefficients_;
};

// What the second half of a chunk waits for, where it is in one loop with the first.
struct Loaded {
  TaskGroups::Id rows = TaskGroups::kNone, panels = TaskGroups::kNone, stats = TaskGroups::kNone;
};

void finish_chunk(const Runner& run, const HostLoss& loss, HostLossWriter& writer, const Chunk& chunk,
                  TaskGroups& groups, const Loaded& loaded) {
  const RowStage rows(run, chunk, loss, writer, groups, loaded.rows, loaded.stats);
  std::optional<BackwardStage> backward;
  if (run.problem.needs_backward() && run.problem.has_gradients()) {
    backward.emplace(run, chunk, Window{0, run.shape.blocks}, groups, rows.coefficients(), loaded.panels);
  }
  groups.run(run.pool, run.schedule.threads);
}

void run_chunk(const Runner& run, const HostLoss& loss, HostLossWriter& writer, const Chunk& chunk) {
  TaskGroups groups(run.arena.groups);
  const LoadStage load(run, chunk, groups);
  std::optional<ForwardStage> forward;
  if (run.problem.needs_forward()) forward.emplace(run, chunk, groups, load.rows());
  const Loaded loaded{load.rows(), load.panels(), forward ? forward->stats() : TaskGroups::kNone};
  if (!run.joins_group()) return finish_chunk(run, loss, writer, chunk, groups, loaded);
  groups.run(run.pool, run.schedule.threads);
  join_group(run, chunk);
  TaskGroups rest(run.arena.groups);
  finish_chunk(run, loss, writer, chunk, rest, {});
}

void run_exact(const Runner& run, const HostLoss& loss) {
  std::fill(run.arena.d_bias.begin(), run.arena.d_bias.end(), 0.0f);
  HostLossWriter writer(loss);
  if (run.schedule.sweeps_vocabulary) {
    Problem rows_only = run.problem;
    rows_only.has.d_classifier = rows_only.has.d_bias = false;
    forget_packed_blocks(rows_of(run, rows_only, {}));
    for_chunks(run,
               [&](const Chunk& chunk) { run_chunk(rows_of(run, rows_only, chunk), loss, writer, chunk); });
    sweep_vocabulary(run);
  } else {
    forget_packed_blocks(run);
    for_chunks(run, [&](const Chunk& chunk) { run_chunk(run, loss, writer, chunk); });
  }
  if (run.problem.needs_forward()) writer.finish();
  if (run.problem.has.d_classifier && run.row_count == 0) zero_d_classifier(run);
  if (run.problem.has.d_bias) store_d_bias(run);
}

}  // namespace

void join_group(const Runner& run, const Chunk& chunk) {
  mark_missing_top(run, chunk);
  join_over_group(run.problem, *run.group, run.pool, run.arena.stats.first(static_cast<size_t>(chunk.count)),
                  run.arena.top.best, run.arena.gathered);
  run.loop(row_tasks(chunk.count), [&](int64_t task, int) {
    tell_rows(run, chunk, task * kTaskRows, std::min(chunk.count, (task + 1) * kTaskRows));
  });
}

void CpuPlan::run(const Buffers& buffers, Workspace workspace, void* /*stream*/,
                  const Communicator* group) const {
  const Problem& problem = problem_;
  Problem work = problem;
  Arena arena = lay_out(problem, kernels_, shape_, schedule_, workspace);
  if (problem.is_thinned() && problem.has.draws) {
    Workspace draws(buffers.draws);
    arena.thinned.draws = lay_out_draws(problem, shape_, draws);
  }
  // 1 / scale must be a float, for the bias' gradient.
  if (std::abs(problem.scale) < std::numeric_limits<float>::min()) work.scale = 0;
  // Logits do not depend on the matrices: only the bias can have a gradient. Of a rank without columns
  // nothing.
  if (work.scale == 0 || work.vocab == 0) {
    work.has.d_hidden = false;
    work.has.d_classifier = false;
  }
  const int64_t row_count = compact_rows(problem, buffers.targets, arena.rows.data());
  const Runner run{work, buffers, schedule_, kernels_, pool_, shape_, arena, group, row_count};
  const HostLoss loss = make_host_loss(problem, buffers, arena.rows.data(), row_count);
  if (problem.needs_forward()) write_ignored_defaults(problem, buffers);
  if (problem.is_thinned()) {
    forget_packed_blocks(run);
    run_thinned(run, loss);
  } else {
    run_exact(run, loss);
  }
  if (problem.has.d_hidden) zero_d_hidden(run, work.has.d_hidden);
  if (problem.has.d_classifier && !work.has.d_classifier) zero_d_classifier(run);
}

}  // namespace logitless::cpu
