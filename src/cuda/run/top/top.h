#pragma once
// The largest logits, and their kernels. Every launcher only queues; pointers are on the device.
#include "core/buffers.h"
#include "cuda/run/arena.h"
#include "cuda/run/runner.h"
#include "cuda/run/top/sizes.h"

namespace logitless::cuda {

// Adds a chunk's row statistics to cleared partials and finds the largest logits of its rows, in the active
// blocks of rows only.
template <class Real>
void sum_rows_and_find_top(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden,
                           const uint8_t* active);
// Writes their ids and log-probabilities, once lse of the chunk's rows is known.
template <class Real>
void write_top(const RunnerOf<Real>& run, const Chunk& chunk);

// Rows of a chunk.
struct TopRows {
  int64_t rows;
  const int32_t* row_count;  // rows from here on do not exist
  const int32_t* target;     // [rows] rows of kIgnoredRow are left out
  int k;
};

// sample[j] = bias[j * step]
void launch_sample_bias(const float* bias, int64_t step, int64_t count, float* sample, const Queue& queue);

// Does this for the bits of each row's mask. row_map: [rows] of the mask.
void launch_sample_mask(const ColumnMask& mask, const int32_t* row_map, const TopRows& rows, int64_t step,
                        int64_t count, int32_t* sample, const Queue& queue);

// Turns the maxima of groups into thresholds, and empties the lists and the list of rows to do again.
void launch_thresholds(const TopArena& top, const TopSizes& sizes, int64_t k, int64_t rows,
                       const int32_t* row_count, const Queue& queue);

// Chooses the best of each list, which has room for `capacity` entries. A list with fewer than k entries
// lacks only logits of -inf if its threshold is the least number: then the first unlisted columns follow.
void launch_choose_listed(const TopArena& top, int capacity, const TopRows& rows, const Queue& queue);

// Does rows again, from all of their logits and without a product. This is correct but slow: a multiprocessor
// takes about as long for a row as to read the weight.
struct RedoTop {
  ConstMatrix hidden;  // [rows, depth] operands
  ConstMatrix weight;  // [columns, depth] the caller's, rounded to hidden's dtype if theirs differs
  int64_t depth, columns;
  LogitTransform<float> transform;
  ColumnMask mask;
  const int32_t* row_map;  // [rows] of the mask
  PartialStats stats;      // their maxima show when no better entry can follow
};
void launch_redo_top(const TopArena& top, const TopRows& rows, const RedoTop& redo, const Queue& queue);

// first: position of the chunk's rows among the computed ones.
template <class Real>
void launch_write_top(const ArenaOf<Real>& arena, int64_t first, const TopRows& rows, const Buffers& out,
                      const Queue& queue);

// Merges and writes those of a group, from the lists that all ranks have sent.
void launch_write_group_top(const Arena& arena, const GroupStats& group, int64_t first, const TopRows& rows,
                            const Buffers& out, const Queue& queue);

}  // namespace logitless::cuda
