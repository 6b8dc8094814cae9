#include <algorithm>

#include "cpu/run/stages.h"

namespace logitless::cpu {

Runner rows_of(const Runner& run, const Problem& problem, const Chunk& chunk) {
  return {problem,
          run.buffers,
          run.schedule,
          run.kernels,
          run.pool,
          run.shape,
          with_rows_of(run.arena, problem, chunk.first, chunk.count),
          run.group,
          run.row_count};
}

// The sums over tokens have the order that they have in any other plan.
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
      const LoadStage load(part, chunk, groups);
      const BackwardStage backward(part, chunk, {block, end}, groups, load.rows(), load.panels());
      groups.run(part.pool, part.schedule.threads);
    });
  }
}

}  // namespace logitless::cpu
