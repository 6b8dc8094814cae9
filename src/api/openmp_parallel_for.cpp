#include "api/run.h"

#ifdef _OPENMP
#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>
#endif

namespace logitless {

#ifdef _OPENMP
namespace {

// After a fork only the forking thread lives on. GNU's OpenMP does not notice, and waits for ever for the
// threads of its pool, even if another part of the process started it. So a child of a process that had
// loaded this library never enters OpenMP.
std::atomic<bool> is_forked{false};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

// Runs a loop on threads of its own; on fewer if the system gives no more.
void run_on_own_threads(int threads, int64_t tasks, LoopBody body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int worker) {
    for (int64_t task = next++; task < tasks; task = next++) body(task, worker);
  };
  const auto workers = static_cast<int>(std::min<int64_t>(threads, tasks));
  std::vector<std::jthread> others;
  try {
    for (int worker = 1; worker < workers; ++worker) others.emplace_back(work, worker);
  } catch (const std::system_error&) {
  }
  work(0);
}

}  // namespace

ParallelFor openmp_parallel_for(int threads) {
  if (threads <= 0) threads = omp_get_max_threads();
  if (threads == 1) return serial_parallel_for();
  return {threads, [threads](int64_t tasks, LoopBody body) {
            if (is_forked) return run_on_own_threads(threads, tasks, body);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
            for (int64_t task = 0; task < tasks; ++task) body(task, omp_get_thread_num());
          }};
}
#elif defined(LOGITLESS_PLANS_ONLY)
// Nothing runs in such a build, so plans are for as many threads as requested.
ParallelFor openmp_parallel_for(int threads) {
  return {threads > 0 ? threads : 1, serial_parallel_for().run};
}
#else
ParallelFor openmp_parallel_for(int) {
  return serial_parallel_for();
}
#endif

}  // namespace logitless
