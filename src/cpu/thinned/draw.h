#pragma once
#include "cpu/run/runner.h"

namespace logitless::cpu {

// All but draw_strip of the rows [row, row_end) of the chunk.

// Before the first window of a chunk: empty lists, and the guesses that need no statistics.
void begin_draws(const Runner& run, const Chunk& chunk, int64_t row, int64_t row_end);

// Before the window of vocabulary blocks that begins at `start`: guesses of lse from the blocks before.
void begin_draw_window(const Runner& run, const Chunk& chunk, int64_t start, int64_t row, int64_t row_end);

// Draws from a strip of logits with the block's statistics of its rows; row: of the chunk.
void draw_strip(const Runner& run, const Chunk& chunk, WorkerArena& w, const LogitStrip& strip,
                const BlockStats& stats, int64_t block, int64_t row);

// After the last window of a forward pass: the lists as a backward pass takes them.
void settle_draws(const Runner& run, const Chunk& chunk, int64_t row, int64_t row_end);

}  // namespace logitless::cpu
