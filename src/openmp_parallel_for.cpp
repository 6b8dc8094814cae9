#include "openmp_parallel_for.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace headroom {

#ifdef _OPENMP
ParallelFor openmp_parallel_for(int threads) {
  if (threads <= 0) threads = omp_get_max_threads();
  if (threads == 1) return serial_parallel_for();
  return {threads, [threads](int64_t tasks, LoopBody body) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
            for (int64_t task = 0; task < tasks; ++task) body(task, omp_get_thread_num());
          }};
}
#else
ParallelFor openmp_parallel_for(int) {
  return serial_parallel_for();
}
#endif

}  // namespace headroom
