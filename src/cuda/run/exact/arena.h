#pragma once
#include "cuda/run/arena.h"

namespace logitless::cuda {

// What an exact run needs beyond inputs and outputs. With a Workspace that only counts: how many bytes it is
// (workspace.used()).
template <class Real>
ArenaOf<Real> lay_out_exact(const Problem& problem, const PlanDetail& detail, Workspace& workspace);

}  // namespace logitless::cuda
