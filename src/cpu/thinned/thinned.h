#pragma once
// The steps of a run of thinned gradients.
#include "core/host_loss.h"
#include "cpu/run/runner.h"

namespace logitless::cpu {

// run.cpp: a run from its rows on; the outputs of the forward pass begin as those of ignored rows.
void run_thinned(const Runner& run, const HostLoss& loss);

// draw.cpp. Before the first window of a chunk: empty lists of its rows, and the guesses that need no
// statistics.
void begin_draws(const Runner& run, const Chunk& chunk, const Range& rows);
// Before the window of vocabulary blocks that begins at `start`: guesses of lse from the blocks before.
void begin_draw_window(const Runner& run, const Chunk& chunk, int64_t start, const Range& rows);
// Draws from a strip of logits with the block's statistics of its rows; row: of the chunk.
void draw_strip(const Runner& run, const Chunk& chunk, WorkerArena& w, const LogitStrip& strip,
                const BlockStats& stats, int64_t block, int64_t row);
// After the last window of a forward pass: the lists as a backward pass takes them.
void settle_draws(const Runner& run, const Chunk& chunk, const Range& rows);

// lists.cpp: a row's elements are added by whoever has a block of it, in any order, under the row's lock. A
// list that has no room is thinned first, by the second draw with what is known of the row's lse by then
// (core/thinning.h says why that changes nothing in the end). What is left then is at most
// thinned_row_capacity() elements but for a probability of 2e-28, and a block more always fits behind them.

// Elements of one block that the first draw kept, and the block's lse.
struct BlockDraw {
  int64_t first_column = 0;
  const int32_t* columns = nullptr;
  const float* logits = nullptr;
  int64_t count = 0;
  LogSumExp<double> lse;
};
void add_to_list(const Runner& run, const Chunk& chunk, int64_t chunk_row, const BlockDraw& drawn);
// After the whole pass: thins the list of row i (of those that are not ignored) by its lse here, and sorts it
// by column.
void settle_list(const Runner& run, int64_t i, const LogSumExp<double>& lse);
// The weight of an element of row i in the gradient, given lse, and its exact probability.
struct Weighed {
  float weight = 0;  // 0: left out
  float probability = 0;
};
Weighed weigh(const Runner& run, int64_t i, const SparseElement& element, const LogSumExp<double>& lse);

// row_gradients.cpp: the kept elements' gradients of the chunk's rows, their d_hidden and what they were made
// of.
void finish_rows(const Runner& run, const HostLoss& loss, const Chunk& chunk);

// column_gradients.cpp: d_classifier and d_bias, from the elements of all rows.
void finish_columns(const Runner& run);

// smoothing_sums.cpp: label smoothing's part of the gradients, c_i w_j for every i and j, is added exactly:
// as the rank one matrix that it is.
void sum_classifier(const Runner& run);  // sum_j w_j C_j, before the rows
void sum_hidden(const Runner& run);      // sum_i c_i E_i, after them
// w_j
float class_weight(const Runner& run, int64_t column);
// sums += value * row, one fp32 row.
void add_row(const Runner& run, std::span<const float> row, float value, std::span<float> sums);

}  // namespace logitless::cpu
