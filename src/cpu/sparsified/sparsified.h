#pragma once
// The steps of a run of sparsified gradients.
#include "core/host_loss.h"
#include "cpu/run/runner.h"

namespace logitless::cpu {

// screen.cpp. Puts exact numbers in the place of those of the screen: logits of the lists' elements, their
// probabilities of having been kept, the target's logit, and an estimate of the sum of exp logits.
void settle_screen(const Runner& run, const Chunk& chunk, const Range& rows);

// draw.cpp. Returns a logit of the caller's row, from a dot product of its own.
double logit_of(const Runner& run, int64_t row, int64_t column);
// Empties the lists of a chunk's rows before its first window, and makes the lse estimates that
// need no statistics.
void begin_draws(const Runner& run, const Chunk& chunk, const Range& rows);
// Makes lse estimates from the blocks before the window of vocabulary blocks that begins at `start`.
void begin_draw_window(const Runner& run, const Chunk& chunk, int64_t start, const Range& rows);
// Draws from a strip of logits with the block's statistics of its rows. `row` is the strip's first row in the
// chunk.
void draw_strip(const Runner& run, const Chunk& chunk, WorkerArena& w, const LogitStrip& strip,
                const BlockStats& stats, int64_t block, int64_t row);
// Leaves the lists, after the last window of a forward pass, as a backward pass takes them.
void settle_draws(const Runner& run, const Chunk& chunk, const Range& rows);

// The weight of an element of row i (of those that are not ignored) in the gradient, given lse, and its exact
// probability.
struct ElementWeight {
  float weight = 0;  // 0: left out
  float probability = 0;
};
ElementWeight reweight(const Runner& run, int64_t i, const SparseElement& element,
                       const LogSumExp<double>& lse);

// gradients.cpp: computes the kept elements' gradients of the chunk's rows and their d_hidden.
void finish_rows(const Runner& run, const HostLoss& loss, const Chunk& chunk);
// Computes d_weight and d_bias, from the elements of all rows.
void finish_columns(const Runner& run);
// Label smoothing's part of the gradients, c_i w_j for every i and j, is a matrix of rank one and is added
// exactly.
void sum_weight(const Runner& run);  // sum_j w_j C_j, before the rows
void sum_hidden(const Runner& run);  // sum_i c_i E_i, after them

}  // namespace logitless::cpu
