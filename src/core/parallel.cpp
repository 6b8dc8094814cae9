#include "core/parallel.h"

namespace logitless {

ParallelFor serial_parallel_for() {
  return {1, [](int64_t tasks, LoopBody body) {
            for (int64_t task = 0; task < tasks; ++task) body(task, 0);
          }};
}

}  // namespace logitless
