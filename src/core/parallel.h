#pragma once
#include <cstdint>
#include <functional>

namespace headroom {

// Calls body(task, worker) once for every task in [0, tasks), possibly at once from several threads;
// worker in [0, threads) names per-thread scratch and is never shared by two calls that run at once.
// Returns when all are done. Bodies must not throw.
struct ParallelFor {
  int threads = 1;
  std::function<void(int64_t tasks, const std::function<void(int64_t task, int worker)>& body)> run;

  void operator()(int64_t tasks, const std::function<void(int64_t task, int worker)>& body) const {
    run(tasks, body);
  }
};

ParallelFor serial_parallel_for();

}  // namespace headroom
