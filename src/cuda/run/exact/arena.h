#pragma once
#include "cuda/run/arena.h"

namespace logitless::cuda {

// Lays out the workspace of an exact run. With a Workspace that only counts, workspace.used() is then its
// bytes.
template <class Real>
ArenaOf<Real> lay_out_exact(const Problem& problem, const PlanDetail& detail, Workspace& workspace);

}  // namespace logitless::cuda
