#pragma once
#include "cuda/run/runner.h"
#include "cuda/run/thinned/arena.h"

namespace logitless::cuda {

// A run of a thinned plan, between the preparation of rows and the end of gradients. All rows are one chunk.
void run_thinned(const Runner& run, const ThinArena& t);

// ---- thinned_forward.cpp
// Of forward passes, before the rows' lse is known: their sums, and with them, where the engine makes both in
// one pass, the first draw with a guess of lse, in a group of all ranks' lse.
void sum_and_draw(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden);
// And after: the first draw with lse itself, of all rows, or of those whose guess was bad.
void finish_draw(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden);
// Of a backward pass without draws, which knows lse.
void draw_of_known_sums(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden);
// Whether rows' sums are relative to an anchor and come with the draw, in one pass; else they are made before
// it.
bool sums_while_drawing(const Runner& run);
// Copies of the first `count` of t.columns, 0 where there is none, and the dense ones' bias.
Operand copy_columns(const Runner& run, const ThinArena& t, int64_t count);

// sum_j w_j C_j, and from it, in forward passes, the rows' sums of weighted logits.
void sum_classifier(const Runner& run, const ThinArena& t, const Operand& hidden);

// ---- thinned_gradients.cpp
void gradients_of_draws(const Runner& run, const ThinArena& t, const Chunk& chunk, const Operand& hidden);

}  // namespace logitless::cuda
