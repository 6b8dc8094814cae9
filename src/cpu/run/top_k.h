#pragma once
#include <cstdint>
#include <limits>
#include <span>

#include "core/problem.h"
#include "core/top_k.h"
#include "core/workspace.h"
#include "cpu/plan/shape.h"
#include "cpu/simd/kernels.h"

namespace logitless::cpu {

struct Runner;
struct Chunk;
struct WorkerArena;

// The largest logits of a row so far.
struct TopRow {
  int32_t lock = 0;
  int32_t count = 0;
  // Of the last one, once there are enough; whoever reads it without the lock may get an older one, which is
  // no larger.
  float least = -std::numeric_limits<float>::infinity();
};

struct TopArena {
  std::span<TopRow> rows;           // [T]
  std::span<TopLogit<float>> best;  // [T, top_k] in order
};

// Scratch of one worker.
struct TopWorker {
  std::span<int32_t> columns;  // [vocab_block + a vector]
  std::span<float> logits;     // [vocab_block + a vector]
};

TopArena lay_out_top(const Problem& problem, int64_t token_chunk, Workspace& workspace);
TopWorker lay_out_top_worker(const Problem& problem, const Shape& shape, Workspace& workspace);

// Whoever has a block of a row adds its large logits, in any order, under the row's lock: the largest of all
// do not depend on it.
void begin_top(const Runner& run, const Chunk& chunk);
// After the strip's statistics, of which `max` has one a row.
void add_to_top(const Runner& run, const WorkerArena& w, const LogitStrip& strip, const float* max,
                int64_t block, int64_t row);
// Of a group, when all blocks are added: the id -1 where there are fewer columns.
void mark_missing_top(const Runner& run, const Chunk& chunk);
// Ids and log-probabilities of the chunk's rows [row, row_end), whose statistics are complete.
void write_top_rows(const Runner& run, const Chunk& chunk, int64_t row, int64_t row_end);

}  // namespace logitless::cpu
