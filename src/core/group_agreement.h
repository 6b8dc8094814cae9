#pragma once
#include <cstdint>

#include "core/communicator.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace logitless {

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
