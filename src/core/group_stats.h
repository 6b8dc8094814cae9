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

// Exchange of row statistics over a group's ranks on host memory. Each rank sends the statistics that the
// problem needs as [numbers, rows] in float64, so that nothing is rounded on the way. With top_k it also
// sends its largest logits and their ids.

// Numbers of a row: float64 on the host, or the float32 numbers that CUDA's kernels exchange.
int64_t group_numbers(const Problem& problem, DType dtype);

// Numbers that a rank sends for a chunk of `rows`: those of its rows, and on CUDA kCutNumbers.
int64_t numbers_of_rank(const Problem& problem, DType dtype, int64_t rows);

// Numbers of all ranks that a workspace on the host has room for: those of a chunk of `rows`, or the messages
// before the first chunk.
int64_t host_numbers(const Problem& problem, int64_t rows);

// Sets Plan::gathers and gathered_bytes of a group's plan with chunks of token_chunk tokens, for numbers of
// that dtype.
void count_gathers(const Problem& problem, DType dtype, int64_t token_chunk, Plan* plan);

// Merges the statistics of all ranks' columns into `rows`, which hold those of this rank's. The order is that
// of ranks, so every rank gets the same bits. The largest logits are merged likewise: top is [rows, top_k],
// in order, with the id -1 where this rank has fewer columns. scratch: [size, numbers_of_rank()].
void join_over_group(const Problem& problem, const Communicator& group, const ParallelFor& parallel_for,
                     std::span<RowStats<double>> rows, std::span<TopLogit<float>> top,
                     std::span<double> scratch);
void join_over_group(const Problem& problem, const Communicator& group, const ParallelFor& parallel_for,
                     std::span<RowStats<double>> rows, std::span<TopLogit<double>> top,
                     std::span<double> scratch);

// A rank's message before a run on the host: the place of its columns, and digests of all that decides which
// rows the ranks exchange. Each number is exact in a float64.
struct RankSummary {
  double start, vocab, total;
  double targets;  // digest
  double rows;     // digest of the rows that are not ignored
};
inline constexpr int64_t kSummaryNumbers = sizeof(RankSummary) / sizeof(double);

// Checks that the ranks fit together, before all other exchanges of a run, so that none waits for ever.
// Throws the same error on every rank if their columns do not make up the vocabulary, or if targets or
// ignored rows differ. workspace: room for a RankSummary of each rank. Only passes that make the loss are
// checked.
void check_agreement(const Problem& problem, const Communicator& group, const void* targets,
                     Workspace workspace);

}  // namespace logitless
