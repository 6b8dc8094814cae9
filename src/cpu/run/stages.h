#pragma once
#include "core/host_loss.h"
#include "cpu/run/runner.h"
#include "cpu/run/task_groups.h"

namespace logitless::cpu {

// The groups of tasks of a chunk, stage by stage. A stage adds its groups when it is made, says what the next
// ones come after, and lives until they have run.

// forward.cpp: statistics of the chunk's rows into arena.stats, exps of kept blocks, draws of thinned
// gradients.
class ForwardStage {
 public:
  ForwardStage(const Runner& run, const Chunk& chunk, TaskGroups& groups, TaskGroups::Id rows);
  TaskGroups::Id stats() const { return stats_; }

 private:
  Range window(int64_t w) const;
  int64_t slot(int64_t w) const;  // of the window's first block in the statistics of blocks
  BlockTasks block_tasks(int64_t w) const;
  void finish(const Range& rows) const;

  const Runner& run_;
  const Chunk& chunk_;
  const bool draws_;
  const int64_t windows_, alive_;
  TaskGroups::Id stats_ = TaskGroups::kNone;
};

// Of the chunk's rows what is told beside the losses, from statistics that are of all ranks.
void tell_rows(const Runner& run, const Chunk& chunk, const Range& rows);

// backward.cpp: gradients of blocks from the chunk's rows, in windows. The sums of a window run beside the
// gradients of the logits of the next.
class BackwardStage {
 public:
  BackwardStage(const Runner& run, const Chunk& chunk, const Range& blocks, TaskGroups& groups,
                TaskGroups::Id coefficients, TaskGroups::Id panels);

 private:
  struct Sums {
    TaskGroups::Id classifier = TaskGroups::kNone, hidden = TaskGroups::kNone, bias = TaskGroups::kNone;
  };
  Range window(int64_t w) const;
  BlockTasks gradient_tasks(int64_t w) const;
  Sums add_sums(TaskGroups& groups, int64_t w, TaskGroups::Id gradients, TaskGroups::Id panels,
                TaskGroups::Id hidden_before) const;
  int64_t classifier_splits(int64_t w) const;

  const Runner& run_;
  const Chunk& chunk_;
  const Range blocks_;
  const int64_t windows_;
  const int64_t hidden_rows_;  // in a task of d_hidden
};

}  // namespace logitless::cpu
