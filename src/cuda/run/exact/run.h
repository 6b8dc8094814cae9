#pragma once
#include "cuda/run/runner.h"

namespace logitless::cuda {

// A run of an exact plan, chunk by chunk, between the preparation of rows and the end of gradients.
template <class Real>
void run_exact(const RunnerOf<Real>& run);

// ---- gradients.cpp
// dz at the targets in a window, where a row has several: in arena.exp_logits, in the place of what is there.
template <class Real>
void write_target_entries(const RunnerOf<Real>& run, const Chunk& chunk, const Window& window,
                          bool are_exp_logits);
// Of the columns whose exp_logits are kept, from these.
void gradients_of_exp_logits(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden);
// Between the two: what the first has left without the rows' factors gets them, and hidden is itself again.
void rescale_for_lse(const Runner& run, const Chunk& chunk);
// Of the other columns, from logits that are computed again, with a known lse.
template <class Real>
void gradients_of_lse(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden);
// row_factor: what rows of the sum still lack, or null.
template <class Real>
void store_d_hidden(const RunnerOf<Real>& run, const Chunk& chunk, const float* row_factor);

}  // namespace logitless::cuda
