#pragma once
#include "cuda/run/runner.h"

namespace logitless::cuda {

// Row statistics of a chunk, in the slots, which are clear, and the largest logits of its rows; active: only
// in these blocks of rows.
template <class Real>
void sum_rows_and_find_top(const RunnerOf<Real>& run, const Chunk& chunk, const Operand& hidden,
                           const uint8_t* active);
// Their ids and log-probabilities, once lse of the chunk's rows is known.
template <class Real>
void write_top(const RunnerOf<Real>& run, const Chunk& chunk);

}  // namespace logitless::cuda
