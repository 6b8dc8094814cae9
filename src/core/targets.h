#pragma once
#include <cstdint>

#include "core/buffers.h"
#include "core/problem.h"

namespace headroom {

// The global target of row i after the shift, or ignore_index.
inline int64_t target_of_row(const Problem& problem, const void* targets, int64_t row) {
  if (problem.shift == 0) return load_as_int64(targets, problem.target_dtype, row);
  const int64_t length = problem.sequence_length > 0 ? problem.sequence_length : problem.tokens;
  const int64_t position = row % length + problem.shift;
  if (position < 0 || position >= length) return problem.ignore_index;
  return load_as_int64(targets, problem.target_dtype, row + problem.shift);
}

// Writes the rows that are not ignored to `rows` (room for N) in ascending order; returns how many.
int64_t compact_rows(const Problem& problem, const void* targets, int64_t* rows);

// Throws kInvalidTarget with value and place in `targets` of a target outside [0, vocab_total) that is not
// ignore_index.
void check_targets(const Problem& problem, const void* targets);

// sum_j w_j over the whole vocabulary, V_total without class weights.
double class_weight_sum(const Problem& problem, const Buffers& buffers);

// The mean's divisor: num_items, or the sum over valid rows of token weight * class weight. 1 for none and
// sum.
double reduction_divisor(const Problem& problem, const Buffers& buffers, const int64_t* rows,
                         int64_t row_count);

}  // namespace headroom
