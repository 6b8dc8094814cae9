#pragma once
#include "cuda/run/runner.h"

namespace logitless::cuda {

// Runs an exact plan chunk by chunk, between the preparation of rows and the end of gradients.
template <class Real>
void run_exact(const RunnerOf<Real>& run);

// ---- gradients.cpp
//
// Overwrites the entries of arena.exp_logits at the targets in a window with their dz, if a row has several
// targets.
template <class Real>
void write_target_entries(const RunnerOf<Real>& run, const Chunk& chunk, const Window& window,
                          bool are_exp_logits);
// Turns kept exp logits into dz in place.
void make_dz(const Runner& run, const Chunk& chunk);
// Makes the gradients of the columns whose exp logits are kept, or whose dz they have become.
void gradients_of_exp_logits(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden);
// Runs between the two kinds of columns. Sums of the first kind lack the rows' factors and get them here;
// hidden rows are restored.
void rescale_for_lse(const Runner& run, const Chunk& chunk);
// Makes the gradients of the other columns. Their logits are computed again, with a known lse.
template <class Real>
void gradients_of_lse(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden);
// row_factor: a factor that rows of the sum still lack, or null.
template <class Real>
void store_d_hidden(const RunnerOf<Real>& run, const Chunk& chunk, const float* row_factor);

}  // namespace logitless::cuda
