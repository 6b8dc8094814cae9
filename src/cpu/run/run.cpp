#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "core/group_stats.h"
#include "core/targets.h"
#include "cpu/backend.h"
#include "cpu/sparsified/sparsified.h"

namespace logitless::cpu {
namespace {

// Writes the losses of the chunk's rows, in order.
void write_losses(const Runner& run, const Chunk& chunk, HostLossWriter& writer) {
  for (int64_t i = 0; i < chunk.count; ++i) {
    writer.add(run.arena.rows[static_cast<size_t>(chunk.first + i)], run.arena.stats[static_cast<size_t>(i)]);
  }
}

// Merges the statistics of the chunk's rows over all ranks and writes the outputs that they give. Runs in the
// thread that runs the plan, between two loops.
void join_group(const Runner& run, const Chunk& chunk) {
  const auto rows = static_cast<size_t>(chunk.count);
  for (size_t i = 0; i < rows && run.problem.top_k > 0; ++i) {  // the id is -1 where there are fewer columns
    const auto best = run.best_of_row(static_cast<int64_t>(i));
    std::fill(best.begin() + run.arena.top_rows[i].count, best.end(), TopLogit<float>{0, -1});
  }
  join_over_group(run.problem, *run.group, run.pool, run.arena.stats.first(rows), run.arena.top_best,
                  run.arena.gathered);
  run.loop(chunk.row_tasks(), [&](int64_t task, int) { write_row_outputs(run, chunk, chunk.rows(task)); });
}

// Computes losses, row coefficients and gradients. `loaded` and `stats` are the groups that they wait for,
// where they are in one loop with the first half.
void finish_chunk(const Runner& run, HostLossWriter& writer, const Chunk& chunk, TaskGroups& groups,
                  const Loaded& loaded, TaskGroups::Id stats) {
  const Problem& p = run.problem;
  const auto write = [&](int64_t, int) { write_losses(run, chunk, writer); };
  const auto load = [&](int64_t task, int) {
    load_coefficients(run, writer.context(), chunk, chunk.rows(task));
  };
  groups.add(p.needs_forward() ? 1 : 0, {stats}, std::cref(write));
  const TaskGroups::Id coefficients =
      groups.add(p.needs_backward() ? chunk.row_tasks() : 0, {loaded.rows, stats}, std::cref(load));
  std::optional<BackwardStage> backward;
  if (p.needs_backward() && p.has_gradients()) {
    backward.emplace(run, chunk, Range{0, run.shape.blocks}, groups, coefficients, loaded.panels);
  }
  groups.run(run.pool, run.schedule.threads);
}

void run_chunk(const Runner& run, HostLossWriter& writer, const Chunk& chunk) {
  TaskGroups groups(run.arena.groups);
  const Loaded loaded = load_chunk(run, chunk, groups);
  std::optional<ForwardStage> forward;
  if (run.problem.needs_forward()) forward.emplace(run, chunk, groups, loaded.rows);
  const TaskGroups::Id stats = forward ? forward->stats() : TaskGroups::kNone;
  if (!run.joins_group()) return finish_chunk(run, writer, chunk, groups, loaded, stats);
  groups.run(run.pool, run.schedule.threads);
  join_group(run, chunk);
  TaskGroups rest(run.arena.groups);
  finish_chunk(run, writer, chunk, rest, {}, TaskGroups::kNone);
}

// Returns the run with the coefficients of the chunk's rows, for a problem with other gradients.
Runner rows_of(const Runner& run, const Problem& problem, const Chunk& chunk) {
  const Arena arena = with_rows_of(run.arena, problem, chunk.first, chunk.count);
  return {problem,   run.buffers, run.schedule, run.kernels,  run.pool,
          run.shape, arena,       run.group,    run.row_count};
}

// Computes d_weight and d_bias window by window, once all rows' coefficients are known. The sums over tokens
// have the same order in every plan.
void sweep_vocabulary(const Runner& run) {
  Problem problem = run.problem;
  problem.has.d_hidden = false;
  if (!problem.has_gradients()) return;
  forget_packed_blocks(rows_of(run, problem, {}));
  const int64_t window = run.schedule.backward_window;
  for (int64_t block = 0; block < run.shape.blocks; block += window) {
    const int64_t end = std::min(run.shape.blocks, block + window);
    for_chunks(run, [&](const Chunk& chunk) {
      const Runner part = rows_of(run, problem, chunk);
      TaskGroups groups(part.arena.groups);
      const Loaded loaded = load_chunk(part, chunk, groups);
      const BackwardStage backward(part, chunk, {block, end}, groups, loaded.rows, loaded.panels);
      groups.run(part.pool, part.schedule.threads);
    });
  }
}

void run_exact(const Runner& run, const HostLoss& loss) {
  std::fill(run.arena.d_bias.begin(), run.arena.d_bias.end(), 0.0f);
  HostLossWriter writer(loss);
  if (run.schedule.sweeps_vocabulary) {
    Problem rows_only = run.problem;
    rows_only.has.d_weight = rows_only.has.d_bias = false;
    forget_packed_blocks(rows_of(run, rows_only, {}));
    for_chunks(run, [&](const Chunk& chunk) { run_chunk(rows_of(run, rows_only, chunk), writer, chunk); });
    sweep_vocabulary(run);
  } else {
    forget_packed_blocks(run);
    for_chunks(run, [&](const Chunk& chunk) { run_chunk(run, writer, chunk); });
  }
  if (run.problem.needs_forward()) writer.finish();
  if (run.problem.has.d_weight && run.row_count == 0) zero_d_weight(run);
  if (run.problem.has.d_bias) store_d_bias(run);
}

void run_sparsified_chunk(const Runner& run, const HostLoss& loss, HostLossWriter& writer,
                          const Chunk& chunk) {
  const Problem& p = run.problem;
  if (draws_elements(p)) {
    TaskGroups groups(run.arena.groups);
    const ForwardStage forward(run, chunk, groups, load_chunk(run, chunk, groups).rows);
    groups.run(run.pool, run.schedule.threads);
  }
  if (run.joins_group()) {
    join_group(run, chunk);
    run.loop(chunk.row_tasks(), [&](int64_t task, int) { settle_draws(run, chunk, chunk.rows(task)); });
  }
  if (p.needs_forward()) write_losses(run, chunk, writer);
  if (p.needs_backward()) finish_rows(run, loss, chunk);
}

// Runs a sparsified problem, whose rows are known. The outputs of the forward pass already hold the values of
// ignored rows.
void run_sparsified(const Runner& run, const HostLoss& loss) {
  const Problem& p = run.problem;
  const SparsifiedArena& t = run.arena.sparsified;
  if (draws_elements(p) && p.tokens > 0) t.draws.seed[0] = seed_of(p, run.buffers);
  std::fill(t.column_count.begin(), t.column_count.end(), 0);
  if (p.needs_backward()) {
    write_undrawn_defaults(p, run.buffers);
    if (p.label_smoothing > 0 && p.has.d_hidden) sum_weight(run);
  }
  HostLossWriter writer(loss);
  for_chunks(run, [&](const Chunk& chunk) { run_sparsified_chunk(run, loss, writer, chunk); });
  if (p.needs_forward()) writer.finish();
  if (!p.has.d_weight && !p.has.d_bias) return;
  if (p.label_smoothing > 0 && p.has.d_weight) sum_hidden(run);
  finish_columns(run);
}

}  // namespace

void CpuPlan::run(const Buffers& buffers, Workspace workspace, void* /*stream*/,
                  const Communicator* group) const {
  const Problem& problem = problem_;
  Problem work = problem;
  Arena arena = lay_out(problem, kernels_, shape_, schedule_, workspace);
  if (problem.is_sparsified() && problem.has.saved) {
    Workspace draws(buffers.saved);
    arena.sparsified.draws = lay_out_draws(problem, shape_, draws);
  }
  // 1 / scale must be a float, for the bias' gradient.
  if (std::abs(problem.scale) < std::numeric_limits<float>::min()) work.scale = 0;
  // With a scale of 0 logits do not depend on the matrices: only the bias can have a gradient. A rank without
  // columns has no gradient.
  if (work.scale == 0 || work.vocab == 0) {
    work.has.d_hidden = false;
    work.has.d_weight = false;
  }
  const int64_t row_count = compact_rows(problem, buffers.targets, arena.rows.data());
  const Runner run{work, buffers, schedule_, kernels_, pool_, shape_, arena, group, row_count};
  const HostLoss loss = make_host_loss(problem, buffers, arena.rows.data(), row_count);
  if (problem.needs_forward()) write_ignored_defaults(problem, buffers);
  if (problem.is_sparsified()) {
    forget_packed_blocks(run);
    keep_exponents(run);
    run_sparsified(run, loss);
  } else {
    run_exact(run, loss);
  }
  if (problem.has.d_hidden) zero_d_hidden(run, work.has.d_hidden);
  if (problem.has.d_weight && !work.has.d_weight) zero_d_weight(run);
}

}  // namespace logitless::cpu
