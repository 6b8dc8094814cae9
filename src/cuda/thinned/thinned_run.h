#pragma once
#include "cuda/cuda_runner.h"
#include "cuda/thinned/thinned_arena.h"

namespace headroom::cuda {

// A run of a thinned plan, between the preparation of rows and the end of gradients. All rows are one chunk.
void run_thinned(const Runner& run, const ThinArena& t);

// ---- thinned_forward.cpp
// The first draw: with a guess of lse (forward passes, which have the rows' sums from it), or with lse
// itself.
void draw(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden);
// Whether rows' sums are relative to an anchor and come with the draw, in one pass; else they are made before
// it.
bool sums_while_drawing(const Runner& run);
// Copies of the first `count` of t.columns, 0 where there is none, and the dense ones' bias.
Operand copy_columns(const Runner& run, const ThinArena& t, int64_t count);

// sum_j w_j C_j, and from it, in forward passes, the rows' sums of weighted logits.
void sum_classifier(const Runner& run, const ThinArena& t, const Operand& hidden);

// ---- thinned_gradients.cpp
void gradients_of_draws(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden);

}  // namespace headroom::cuda
