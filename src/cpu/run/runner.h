#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "core/buffers.h"
#include "core/communicator.h"
#include "core/host_loss.h"
#include "core/parallel.h"
#include "core/problem.h"
#include "cpu/plan/shape.h"
#include "cpu/run/arena.h"
#include "cpu/run/task_groups.h"
#include "cpu/simd/kernels.h"

namespace logitless::cpu {

inline constexpr int kMaxStripRows = 16;  // at least every kernel's mr
inline constexpr int kMaxStripTargets = kMaxStripRows * static_cast<int>(kMostTargetsPerRow);
inline constexpr int64_t kTasksPerThread = 16;  // enough to even out the ends of the threads
inline constexpr int64_t kTaskRows = 64;        // rows of a task that runs no matrix product

// One run in progress: everything that its steps read.
struct Runner {
  const Problem& problem;
  const Buffers& buffers;
  const Schedule& schedule;
  const Kernels& kernels;
  const ParallelFor& pool;
  const Shape shape;
  const Arena arena;
  const Communicator* group;  // null without a group
  int64_t row_count = 0;      // rows that are not ignored

  // Whether ranks meet between the passes over the logits and the rows.
  bool joins_group() const { return group != nullptr && problem.needs_forward(); }
  // Targets of a row; then the target logits of the chunk's row.
  int64_t targets() const { return problem.target_count(); }
  std::span<const float> target_logits(int64_t row) const {
    return arena.target_logit.subspan(static_cast<size_t>(row * targets()), static_cast<size_t>(targets()));
  }
  std::span<TopLogit<float>> best_of_row(int64_t row) const {
    const auto k = static_cast<size_t>(problem.top_k);
    return arena.top_best.subspan(static_cast<size_t>(row) * k, k);
  }

  std::span<SampleRow> samples_of_row(int64_t row) const {
    const auto count = static_cast<size_t>(problem.num_samples);
    return arena.samples.subspan(static_cast<size_t>(row) * count, count);
  }

  // The operands from a row on, and a row of their gradients.
  MatrixView hidden_from(int64_t row) const;
  MatrixView weight_from(int64_t row) const;
  std::byte* d_hidden_row(int64_t row) const;
  std::byte* d_weight_row(int64_t row, int64_t column = 0) const;

  // Calls body(task, worker) for every task, on at most schedule.threads workers.
  void loop(int64_t tasks, LoopBody body) const;
  WorkerArena worker(int index) const;
  // The transform of a strip that begins with the chunk's row.
  LogitTransform<float> transform(const WorkerArena& w, int64_t row) const;
  // Places of a kept block's exp logits, of the gradients of any block's logits, of the logit offsets of exp
  // logits, and of the block's panels for d_hidden.
  std::byte* kept_exp_logits(int64_t block) const;
  std::byte* block_gradients(int64_t block) const;
  float* block_offset(int64_t block) const;
  uint32_t* block_panels(int64_t block) const;
  bool is_kept(int64_t block) const {
    return block < schedule.kept_blocks && (!schedule.keeps_in_gradient || gradient_can_keep());
  }
  // Whether d_weight's memory can hold exp logits, which a plan does not know. Otherwise they are computed
  // again.
  bool gradient_can_keep() const {
    return buffers.d_weight_stride == problem.hidden &&
           reinterpret_cast<uintptr_t>(buffers.d_weight) % sizeof(float) == 0;
  }
};

// A row's lock. Workers that share a row meet rarely, and hold it for some hundred elements. The flag is 0
// while the lock is free.
class RowLock {
 public:
  explicit RowLock(int32_t& flag) : flag_(flag) {
    while (flag_.exchange(1, std::memory_order_acquire) != 0) std::this_thread::yield();
  }
  ~RowLock() { flag_.store(0, std::memory_order_release); }
  RowLock(const RowLock&) = delete;
  RowLock& operator=(const RowLock&) = delete;

 private:
  std::atomic_ref<int32_t> flag_;
};

// A range of blocks, columns, or rows of a chunk.
struct Range {
  int64_t start = 0;
  int64_t end = 0;
  int64_t size() const { return end - start; }
};

// Rows [first, first + count) of Arena::rows, worked on together.
struct Chunk {
  int64_t first = 0;
  int64_t count = 0;
  bool is_first = false;
  bool is_last = false;

  // Number of tasks of kTaskRows rows, and the rows of each.
  int64_t row_tasks() const { return ceil_div(count, kTaskRows); }
  Range rows(int64_t task) const { return {task * kTaskRows, std::min(count, (task + 1) * kTaskRows)}; }
};

// Calls the body for all rows, chunk by chunk.
template <class Body>
void for_chunks(const Runner& run, const Body& body) {
  for (int64_t first = 0; first < run.row_count; first += run.schedule.token_chunk) {
    const int64_t count = std::min(run.schedule.token_chunk, run.row_count - first);
    body(Chunk{first, count, first == 0, first + count == run.row_count});
  }
}

// logits.cpp. In order: copies at most nr rows of an operand into the worker's scratch, rounded to e4m3
// (core/fp8.h) with their exponents or with known ones; writes those of the weight's rows, if the run keeps
// them and does not have them from an earlier run; packs a block of the weight unless the worker holds it;
// computes dot products of a strip with it; returns the strip as the softmax kernels want it.
MatrixView rounded_rows(const Runner& run, const WorkerArena& w, const MatrixView& from, int64_t rows,
                        const int32_t* known = nullptr);
void keep_exponents(const Runner& run);
void prepare_block(const Runner& run, WorkerArena& w, int64_t block);
void forget_packed_blocks(const Runner& run);
void strip_logits(const Runner& run, const WorkerArena& w, int64_t row, int rows);
LogitStrip logit_strip(const Runner& run, const WorkerArena& w, int64_t block, int64_t row, int rows,
                       int32_t* target_columns);
// Returns t'(z) of a logit as the kernels compute it: 0 where it has reached the softcap.
inline double softcap_slope(const Problem& problem, double z, double inverse_temperature) {
  return logit_transform<float>(problem).slope(z, static_cast<float>(inverse_temperature));
}
// Splits `rows` into about `wanted` equal ranges of whole strips; returns the rows of a range.
int64_t rows_per_range(const Runner& run, int64_t rows, int64_t wanted);

// Tasks over the rows of a window's blocks. Where there are as many blocks as threads, each block is one
// task, which packs it once. The last blocks of all are cut into small tasks, so that all threads end
// together.
class BlockTasks {
 public:
  struct Task {
    int64_t block;
    Range rows;
  };
  BlockTasks(const Runner& run, const Range& window, int64_t rows, bool is_last);
  int64_t count() const { return whole_ + (window_.size() - whole_) * ranges_; }
  Task operator[](int64_t task) const;

 private:
  Range window_;
  int64_t rows_, range_, ranges_, whole_;
};

// rows.cpp: gathers hidden rows and targets of the chunk, and packs rows as panels for d_weight. Returns the
// groups of both.
struct Loaded {
  TaskGroups::Id rows = TaskGroups::kNone, panels = TaskGroups::kNone;
};
Loaded load_chunk(const Runner& run, const Chunk& chunk, TaskGroups& groups);
// Computes lse and row coefficients of rows of the chunk, from the statistics or from the buffers.
void load_coefficients(const Runner& run, const HostLoss& loss, const Chunk& chunk, const Range& rows);

// backward.cpp
void store_d_bias(const Runner& run);
void zero_d_hidden(const Runner& run, bool ignored_only);
void zero_d_weight(const Runner& run);

// The groups of tasks of a chunk, stage by stage. A stage adds its groups when it is made and says what the
// next groups come after. It lives until they have run.

// forward.cpp: computes the chunk's rows' statistics into arena.stats, the exp logits of kept blocks, and
// draws of sparsified gradients.
class ForwardStage {
 public:
  ForwardStage(const Runner& run, const Chunk& chunk, TaskGroups& groups, TaskGroups::Id rows);
  TaskGroups::Id stats() const { return stats_; }

 private:
  Range window(int64_t w) const;
  int64_t partial(int64_t w) const;  // the place of the window's first block in the statistics of blocks
  BlockTasks block_tasks(int64_t w) const;
  void finish(const Range& rows) const;

  const Runner& run_;
  const Chunk& chunk_;
  const bool draws_;
  const int64_t windows_, alive_;
  TaskGroups::Id stats_ = TaskGroups::kNone;
};

// Writes the chunk's outputs other than losses, from statistics of all ranks.
void write_row_outputs(const Runner& run, const Chunk& chunk, const Range& rows);

// backward.cpp: computes gradients of blocks from the chunk's rows, in windows. A window's sums run beside
// the gradients of the next window's logits.
class BackwardStage {
 public:
  BackwardStage(const Runner& run, const Chunk& chunk, const Range& blocks, TaskGroups& groups,
                TaskGroups::Id coefficients, TaskGroups::Id panels);

 private:
  struct Sums {
    TaskGroups::Id weight = TaskGroups::kNone, hidden = TaskGroups::kNone, bias = TaskGroups::kNone;
  };
  Range window(int64_t w) const;
  BlockTasks gradient_tasks(int64_t w) const;
  Sums add_sums(TaskGroups& groups, int64_t w, TaskGroups::Id gradients, TaskGroups::Id panels,
                TaskGroups::Id hidden_before) const;
  int64_t weight_splits(int64_t w) const;

  const Runner& run_;
  const Chunk& chunk_;
  const Range blocks_;
  const int64_t windows_;
  const int64_t hidden_rows_;  // rows in a task of d_hidden
};

}  // namespace logitless::cpu
