#pragma once
#include <cstdint>
#include <span>

#include "core/communicator.h"
#include "core/parallel.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/row_stats.h"
#include "core/top_k.h"
#include "core/workspace.h"

namespace logitless {

// What ranks of a group tell each other of a row on host memory: the statistics that the problem wants, in
// float64, [numbers, rows] a rank, so that nothing is rounded on the way; and with top_k their largest
// logits and the ids of these.

// How many numbers of a row: of float64, or of the float32 that CUDA's kernels tell each other.
int64_t group_numbers(const Problem& problem, DType dtype);

// How many numbers a rank tells of a chunk of so many rows: theirs, and on CUDA kCutNumbers.
int64_t numbers_of_rank(const Problem& problem, DType dtype, int64_t rows);

// How many numbers of all ranks a workspace of the host has room for: those of a chunk of so many rows, or
// what ranks tell each other before the first one.
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

// A rank's message before a run on the host: where its columns lie, and digests of what decides which rows
// all ranks tell each other of. Each number is exact in a float64.
struct RankTold {
  double start, vocab, total;
  double targets;  // digest
  double rows;     // digest of those that are not ignored
};
inline constexpr int64_t kToldNumbers = sizeof(RankTold) / sizeof(double);

// Before anything else of a run, so that ranks that do not fit together never wait for each other: throws
// the same error on every rank where their columns do not make the vocabulary, or their targets or ignored
// rows differ. workspace: room for a RankTold of each rank. Only of a pass that makes the loss.
void check_agreement(const Problem& problem, const Communicator& group, const void* targets,
                     Workspace workspace);

}  // namespace logitless
