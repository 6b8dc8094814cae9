#pragma once
#include <cstdint>
#include <span>

#include "core/communicator.h"
#include "core/parallel.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/row_stats.h"
#include "core/top_k.h"

namespace logitless {

// What ranks of a group tell each other of a row on host memory: the statistics that the problem wants, in
// float64, [numbers, rows] a rank, so that nothing is rounded on the way; and with top_k their largest
// logits and the ids of these.

// How many numbers of a row: of float64, or of the float32 that CUDA's kernels tell each other.
int64_t group_numbers(const Problem& problem, DType dtype);

// How many numbers a rank tells of a chunk of so many rows: theirs, and on CUDA kCutNumbers.
int64_t numbers_of_rank(const Problem& problem, DType dtype, int64_t rows);

// How many numbers of all ranks a workspace of the host has room for: those of a chunk of so many rows, or
// what ranks tell each other before the first one (group_agreement.h).
int64_t host_numbers(const Problem& problem, int64_t rows);

// What a plan of a group with chunks of so many tokens exchanges, numbers of that dtype: Plan::gathers and
// gathered_bytes.
void count_gathers(const Problem& problem, DType dtype, int64_t token_chunk, Plan* plan);

// Statistics of this rank's columns become those of all ranks', merged in the order of ranks: the same bits
// on each of them. So do the largest logits of rows: top is [rows, top_k], in order, with the id -1 where
// this rank's columns are fewer. scratch: [size, numbers_of_rank()].
void join_over_group(const Problem& problem, const Communicator& group, const ParallelFor& parallel_for,
                     std::span<RowStats<double>> rows, std::span<TopLogit<float>> top,
                     std::span<double> scratch);
void join_over_group(const Problem& problem, const Communicator& group, const ParallelFor& parallel_for,
                     std::span<RowStats<double>> rows, std::span<TopLogit<double>> top,
                     std::span<double> scratch);

}  // namespace logitless
