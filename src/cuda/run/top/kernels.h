#pragma once
// Kernels of the largest logits. Every launcher only queues; pointers are of the device.
#include "core/buffers.h"
#include "cuda/run/arena.h"
#include "cuda/run/top/sizes.h"

namespace logitless::cuda {

class Queue;

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
// multiprocessor takes about as long for a row as it takes to read the classifier.
struct RedoTop {
  const void* hidden;  // [rows, depth] operands
  int64_t hidden_stride;
  DType dtype;             // of the product's operands
  const void* classifier;  // [columns, depth] the caller's, rounded to dtype where it has another
  DType classifier_dtype;
  int64_t classifier_stride;
  int64_t depth, columns;
  LogitTransform<float> transform;
  StatSlots stats;  // whose maxima say when no better one can follow
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
