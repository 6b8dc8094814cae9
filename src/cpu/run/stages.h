#pragma once
#include "core/host_loss.h"
#include "cpu/run/runner.h"
#include "cpu/run/task_groups.h"

namespace logitless::cpu {

// The groups of tasks of a chunk, stage by stage. A stage adds its groups when it is made, says what the next
// ones come after, and lives until they have run.

// chunk.cpp: gathers hidden rows and targets; for d_classifier, packs rows as panels.
class LoadStage {
 public:
  LoadStage(const Runner& run, const Chunk& chunk, TaskGroups& groups);
  TaskGroups::Id rows() const { return rows_; }
  TaskGroups::Id panels() const { return panels_; }

 private:
  void load_rows(int64_t item, int64_t task, int worker) const;
  void pack_panels(int64_t item, int64_t task, int worker) const;

  const Runner& run_;
  const Chunk& chunk_;
  TaskGroups::Id rows_, panels_;
};

// cpu_forward.cpp: statistics of the chunk's rows into arena.stats, exps of kept blocks, draws of thinned
// gradients.
class ForwardStage {
 public:
  ForwardStage(const Runner& run, const Chunk& chunk, TaskGroups& groups, TaskGroups::Id rows);
  TaskGroups::Id stats() const { return stats_; }

 private:
  Window window(int64_t w) const;
  int64_t slot(int64_t w) const;  // of the window's first block in the statistics of blocks
  BlockTasks block_tasks(int64_t w) const;
  void begin_draws_of_rows(int64_t item, int64_t task, int worker) const;
  void begin_window(int64_t w, int64_t task, int worker) const;
  void blocks(int64_t w, int64_t task, int worker) const;
  void merge(int64_t w, int64_t task, int worker) const;
  void finish(int64_t item, int64_t task, int worker) const;

  const Runner& run_;
  const Chunk& chunk_;
  const bool draws_;
  const int64_t windows_, alive_;
  TaskGroups::Id stats_ = TaskGroups::kNone;
};

// Of the chunk's rows [row, row_end) what is told beside the losses, whose statistics are of all ranks.
void tell_rows(const Runner& run, const Chunk& chunk, int64_t row, int64_t row_end);

// backward.cpp: gradients of the blocks [blocks.start, blocks.end) from the chunk's rows, in windows. The
// sums of a window run beside the gradients of the logits of the next.
class BackwardStage {
 public:
  BackwardStage(const Runner& run, const Chunk& chunk, const Window& blocks, TaskGroups& groups,
                TaskGroups::Id coefficients, TaskGroups::Id panels);

 private:
  struct Sums {
    TaskGroups::Id classifier = TaskGroups::kNone, hidden = TaskGroups::kNone, bias = TaskGroups::kNone;
  };
  Window window(int64_t w) const;
  BlockTasks gradient_tasks(int64_t w) const;
  Sums add_sums(TaskGroups& groups, int64_t w, TaskGroups::Id gradients, TaskGroups::Id panels,
                TaskGroups::Id hidden_before) const;
  int64_t classifier_splits(int64_t w) const;
  void gradients(int64_t w, int64_t task, int worker) const;
  void classifier(int64_t w, int64_t task, int worker) const;
  void hidden(int64_t w, int64_t task, int worker) const;
  void bias(int64_t w, int64_t task, int worker) const;
  void store_hidden(int64_t item, int64_t task, int worker) const;

  const Runner& run_;
  const Chunk& chunk_;
  const Window blocks_;
  const int64_t windows_;
  const int64_t hidden_rows_;  // in a task of d_hidden
};

}  // namespace logitless::cpu
