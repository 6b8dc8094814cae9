#pragma once
#include "core/parallel.h"

namespace logitless {

// threads 0: as many as OpenMP gives now. Tasks are handed out in order, one at a time. After a fork, which
// OpenMP's threads may not survive, a loop runs on threads of its own.
ParallelFor openmp_parallel_for(int threads);

}  // namespace logitless
