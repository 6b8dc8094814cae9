#pragma once
#include <span>

#include "core/buffers.h"
#include "core/communicator.h"
#include "core/parallel.h"
#include "core/problem.h"
#include "core/row_coefficients.h"
#include "core/row_stats.h"
#include "core/top_k.h"
#include "core/workspace.h"

namespace logitless::reference {

struct Scratch {
  std::span<int64_t> rows;                          // [N] the rows that are not ignored
  std::span<RowStats<double>> stats;                // [N] forward
  std::span<double> gathered;                       // [ranks, numbers, N] the statistics of a group
  std::span<RowCoefficients<double>> coefficients;  // [N] backward
  std::span<LogSumExp<double>> lse;                 // [N] backward
  std::span<double> accumulator;                    // [threads, D] backward
  std::span<TopLogit<double>> top;                  // [N, top_k]
  int64_t seed = 0;                                 // thinned
};

Scratch lay_out(const Problem& problem, int threads, Workspace& workspace);

void run(const Problem& problem, int threads, const Buffers& buffers, Workspace workspace,
         const ParallelFor& parallel_for, const Communicator* group);

}  // namespace logitless::reference
