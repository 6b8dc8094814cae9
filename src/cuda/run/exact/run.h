#pragma once
#include "cuda/run/runner.h"

namespace logitless::cuda {

// Runs an exact plan chunk by chunk, between the preparation of rows and the end of gradients.
template <class Real>
void run_exact(const RunnerOf<Real>& run);

// ---- gradients.cpp
//
// Overwrites the kept exp logits at the targets with their dz, if a row has several targets. Rows still lack
// their factor.
void write_target_entries(const Runner& run, const Chunk& chunk);
// Whether windows of dz are made of saved exp logits, which stay as they are.
template <class Real>
bool makes_dz_of_saved(const RunnerOf<Real>& run) {
  const Problem& p = run.problem;
  return p.needs_backward() && saves_exp_logits(p, run.detail) && exp_logits_become_dz(p);
}
// Writes the further rows of saved exp logits that label smoothing needs.
void save_smoothing_rows(const Runner& run, const Chunk& chunk);
// Restores elements of saved exp logits that were replaced at the targets.
void restore_exp_logits(const Runner& run, const Chunk& chunk);
// Makes the gradients of the columns whose exp logits are kept, if a factor for each row is enough.
void gradients_of_exp_logits(const Runner& run, const Chunk& chunk, const ConstMatrix& hidden);
// Runs between the two kinds of columns. Sums of the first kind lack the rows' factors and get them here;
// hidden rows are restored.
void rescale_for_lse(const Runner& run, const Chunk& chunk);
// Makes the gradients of the other columns from windows of dz. Logits are computed again, with a known lse,
// unless exp logits of the columns are kept.
template <class Real>
void gradients_of_lse(const RunnerOf<Real>& run, const Chunk& chunk, const ConstMatrix& hidden);
// row_factor: a factor that rows of the sum still lack, or null.
template <class Real>
void store_d_hidden(const RunnerOf<Real>& run, const Chunk& chunk, const float* row_factor);

}  // namespace logitless::cuda
