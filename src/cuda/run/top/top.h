#pragma once
// The largest logits, and their kernels. Every launcher only queues; pointers are of the device.
#include "core/buffers.h"
#include "cuda/run/arena.h"
#include "cuda/run/runner.h"
#include "cuda/run/top/sizes.h"

namespace logitless::cuda {

// Row statistics of a chunk, in the partials, which are clear, and the largest logits of its rows; active:
// only in these blocks of rows.
template <class Real>
void sum_rows_and_find_top(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                           const uint8_t* active);
// Their ids and log-probabilities, once lse of the chunk's rows is known.
template <class Real>
void write_top(const RunnerOf<Real>& run, const Chunk& chunk);

// sample[j] = bias[j * step]
void launch_sample_bias(const float* bias, int64_t step, int64_t count, float* sample, const Queue& queue);

// From the maxima of groups to thresholds; lists, and the list of rows to do again, become empty.
void launch_thresholds(const TopArena& top, const TopSizes& sizes, int64_t k, int64_t rows,
                       const int32_t* row_count, const Queue& queue);

// Rows of a chunk.
struct TopRows {
  int64_t rows;
  const int32_t* row_count;  // rows at or past it do not exist
  const int32_t* target;     // [rows] rows of kIgnoredRow are left out
  int k;
};

// The best of each list, of whose length there is room for `capacity`. What a list of fewer than k lacks are
// logits of -inf, if its threshold is the least number: then the first columns that are not listed.
void launch_choose_listed(const TopArena& top, int capacity, const TopRows& rows, const Queue& queue);

// The rows that are to be done again: all of their logits, with no product's help. Right, and slow: a
// multiprocessor takes about as long for a row as it takes to read the weight.
struct RedoTop {
  ConstMatrix hidden;  // [rows, depth] operands
  ConstMatrix weight;  // [columns, depth] the caller's, rounded to hidden's dtype where it has another
  int64_t depth, columns;
  LogitTransform<float> transform;
  PartialStats stats;  // whose maxima say when no better one can follow
};
void launch_redo_top(const TopArena& top, const TopRows& rows, const RedoTop& redo, const Queue& queue);

// first: of the chunk's rows among the computed ones.
template <class Real>
void launch_write_top(const ArenaOf<Real>& arena, int64_t first, const TopRows& rows, const Buffers& out,
                      const Queue& queue);

// The same of a group, from what all ranks have told.
void launch_write_group_top(const Arena& arena, const GroupStats& group, int64_t first, const TopRows& rows,
                            const Buffers& out, const Queue& queue);

}  // namespace logitless::cuda
