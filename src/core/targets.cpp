#include "core/targets.h"

#include <string>

#include "core/status.h"

namespace logitless {

int64_t compact_rows(const Problem& problem, const void* targets, int64_t* rows) {
  int64_t count = 0;
  for (int64_t row = 0; row < problem.tokens; ++row) {
    if (target_of_row(problem, targets, row) != problem.ignore_index) rows[count++] = row;
  }
  return count;
}

void check_targets(const Problem& problem, const void* targets) {
  const int64_t count = problem.target_count();
  for (int64_t at = 0; at < problem.tokens * count; ++at) {
    const int64_t row = at / count, k = at % count;
    const int64_t target = target_of_row(problem, targets, row, k);
    if (target == problem.ignore_index || (target >= 0 && target < problem.vocab_total)) continue;
    const std::string column = problem.targets_per_row > 0 ? ", " + std::to_string(k) : "";
    const std::string place = std::to_string(row + problem.shift) + column;
    throw Error(Status::kInvalidTarget,
                ErrorInfo{.argument = "targets",
                          .expected = "0 <= target < " + std::to_string(problem.vocab_total) +
                                      " or ignore_index " + std::to_string(problem.ignore_index),
                          .got = std::to_string(target),
                          .row = (row + problem.shift) * count + k,
                          .place = place});
  }
}

double class_weight_sum(const Problem& problem, const Buffers& buffers) {
  if (!problem.has.class_weight) return static_cast<double>(problem.vocab_total);
  double sum = 0;
  for (int64_t j = 0; j < problem.vocab_total; ++j) {
    sum += load_as_double(buffers.class_weight, problem.stats_dtype(), j);
  }
  return sum;
}

double reduction_divisor(const Problem& problem, const Buffers& buffers, const int64_t* rows,
                         int64_t row_count) {
  if (problem.reduction != Reduction::kMean) return 1;
  if (buffers.num_items != nullptr) return load_as_double(buffers.num_items, problem.stats_dtype(), 0);
  if (problem.num_items > 0) return problem.num_items;
  if (!problem.has.class_weight && !problem.has.token_weight) return static_cast<double>(row_count);
  const DType dtype = problem.stats_dtype();
  double sum = 0;
  for (int64_t i = 0; i < row_count; ++i) {
    const int64_t target = target_of_row(problem, buffers.targets, rows[i]);
    const double token = problem.has.token_weight ? load_as_double(buffers.token_weight, dtype, rows[i]) : 1;
    const double weight = problem.has.class_weight ? load_as_double(buffers.class_weight, dtype, target) : 1;
    sum += token * weight;
  }
  return sum;
}

}  // namespace logitless
