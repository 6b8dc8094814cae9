#pragma once
#include <cstdint>

#include "core/buffers.h"
#include "core/problem.h"

namespace logitless {

// Whether row i has targets after the shift: those of row i + shift.
inline bool has_targets(const Problem& problem, int64_t row) {
  if (problem.shift == 0) return true;
  const int64_t length = problem.sequence_length > 0 ? problem.sequence_length : problem.tokens;
  const int64_t position = row % length + problem.shift;
  return position >= 0 && position < length;
}

// Returns the k-th of problem.target_count() global targets of row i after the shift, or ignore_index.
inline int64_t target_of_row(const Problem& problem, const void* targets, int64_t row, int64_t k) {
  if (!has_targets(problem, row)) return problem.ignore_index;
  if (targets == nullptr) return 0;  // where rows are only sampled from
  return load_as_int64(targets, problem.dtype.targets, (row + problem.shift) * problem.target_count() + k);
}

// Whether a target is one of this run's columns, and not ignore_index.
inline bool is_here(const Problem& problem, int64_t target) {
  const int64_t column = target - problem.vocab_start;
  return target != problem.ignore_index && column >= 0 && column < problem.vocab;
}

// Returns the first target that is not ignore_index, or ignore_index if there is none: then the row is
// ignored.
inline int64_t target_of_row(const Problem& problem, const void* targets, int64_t row) {
  if (!has_targets(problem, row)) return problem.ignore_index;
  for (int64_t k = 0; k < problem.target_count(); ++k) {
    const int64_t target = target_of_row(problem, targets, row, k);
    if (target != problem.ignore_index) return target;
  }
  return problem.ignore_index;
}

// Returns the weight of the k-th target of a row: 0 for ignore_index, 1 without weights.
inline double target_weight_of_row(const Problem& problem, const Buffers& buffers, int64_t row, int64_t k) {
  if (target_of_row(problem, buffers.targets, row, k) == problem.ignore_index) return 0;
  if (buffers.target_weight == nullptr) return 1;
  return load_as_double(buffers.target_weight, problem.stats_dtype(),
                        (row + problem.shift) * problem.target_count() + k);
}

// Returns the weight of a global id as the target of a row: the sum of the weights of the targets equal to
// it.
inline double weight_as_target(const Problem& problem, const Buffers& buffers, int64_t row, int64_t id) {
  double sum = 0;
  for (int64_t k = 0; k < problem.target_count(); ++k) {
    if (target_of_row(problem, buffers.targets, row, k) != id) continue;
    sum += target_weight_of_row(problem, buffers, row, k);
  }
  return sum;
}

// Writes the rows that are not ignored to `rows` (room for N) in ascending order; returns how many.
int64_t compact_rows(const Problem& problem, const void* targets, int64_t* rows);

// Throws kInvalidTarget for a target outside [0, vocab_total) that is not ignore_index, with its value and
// place; with several targets a row, its row and column.
void check_targets(const Problem& problem, const void* targets);

// Returns sum_j w_j over the whole vocabulary, V_total without class weights.
double class_weight_sum(const Problem& problem, const Buffers& buffers);

// Returns the mean's divisor: num_items, or the sum over valid rows of token weight * class weight. Other
// reductions have 1.
double reduction_divisor(const Problem& problem, const Buffers& buffers, const int64_t* rows,
                         int64_t row_count);

}  // namespace logitless
