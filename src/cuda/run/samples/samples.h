#pragma once
// Samples of the softmax, in forward passes without float64 operands.
#include "cuda/run/runner.h"

namespace logitless::cuda {

// Adds a chunk's row statistics to cleared partials and samples from its rows, in the active blocks of rows
// only.
void sum_rows_and_sample(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden,
                         const uint8_t* active);
// Writes the samples, once lse of the chunk's rows is known.
void write_samples(const Runner& run, const Chunk& chunk);

// Rows of a chunk.
struct SampleRows {
  int64_t first, rows;       // first: among the computed ones
  const int32_t* row_count;  // rows from here on do not exist
};
void launch_begin_samples(const Problem& problem, const Arena& arena, const SampleRows& rows,
                          const Buffers& in, const Queue& queue);
void launch_write_samples(const Problem& problem, const Arena& arena, const SampleRows& rows,
                          const Buffers& out, const Queue& queue);

}  // namespace logitless::cuda
