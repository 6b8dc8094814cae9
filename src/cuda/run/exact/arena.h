#pragma once
#include "cuda/run/arena.h"

namespace logitless::cuda {

// Lays out the workspace of an exact run, and Buffers::saved. With Workspaces that only count, their used()
// are then the bytes of both.
template <class Real>
ArenaOf<Real> lay_out_exact(const Problem& problem, const PlanDetail& detail, Workspace& workspace,
                            Workspace& saved);

}  // namespace logitless::cuda
