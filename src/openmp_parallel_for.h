#pragma once
#include "core/parallel.h"

namespace headroom {

// threads 0: as many as OpenMP gives now. Tasks are handed out in order, one at a time.
ParallelFor openmp_parallel_for(int threads);

}  // namespace headroom
