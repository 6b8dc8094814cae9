#pragma once
#include <cstdint>

#include "cpu/run/runner.h"

namespace logitless::cpu {

// A row's elements are added by whoever has a block of it, in any order, under the row's lock. A list that
// has no room is thinned first, by the second draw with what is known of the row's lse by then
// (core/thinning.h says why that changes nothing in the end). What is left then is at most
// thinned_row_capacity() elements but for a probability of 2e-28, and a block more always fits behind them.

// Begins the list of row i (of those that are not ignored).
void begin_list(const Runner& run, int64_t i);

// `known` counts from here on: that of the blocks before, -inf for none.
void restart_known(const Runner& run, int64_t chunk_row, const LogSumExp<double>& known);

// Elements of one block that the first draw kept, and the block's lse.
struct BlockDraw {
  int64_t first_column = 0;
  const int32_t* columns = nullptr;
  const float* logits = nullptr;
  int64_t count = 0;
  LogSumExp<double> lse;
};
void add_to_list(const Runner& run, const Chunk& chunk, int64_t chunk_row, const BlockDraw& drawn);

// After the whole pass: thins the list by the row's lse here, and sorts it by column.
void settle_list(const Runner& run, int64_t i, const LogSumExp<double>& lse);

// The weight of an element of row i in the gradient, given lse, and its exact probability.
struct Weighed {
  float weight = 0;  // 0: left out
  float probability = 0;
};
Weighed weigh(const Runner& run, int64_t i, const SparseElement& element, const LogSumExp<double>& lse);

}  // namespace logitless::cpu
