#include "core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "openmp_parallel_for.h"

namespace headroom {
namespace {

void expect_each_task_once(const ParallelFor& parallel_for) {
  for (int64_t tasks : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(tasks));
    std::vector<std::atomic<int>> busy(static_cast<size_t>(parallel_for.threads));
    std::atomic<int> wrong{0};
    parallel_for(tasks, [&](int64_t task, int worker) {
      if (worker < 0 || worker >= parallel_for.threads || busy[static_cast<size_t>(worker)]++ != 0) ++wrong;
      ++calls[static_cast<size_t>(task)];
      --busy[static_cast<size_t>(worker)];
    });
    EXPECT_EQ(wrong, 0) << "a worker's number was shared or out of range";
    for (const auto& count : calls) EXPECT_EQ(count, 1);
  }
}

TEST(ParallelFor, SerialRunsEachTaskOnce) {
  EXPECT_EQ(serial_parallel_for().threads, 1);
  expect_each_task_once(serial_parallel_for());
}

TEST(ParallelFor, OpenMPRunsEachTaskOnce) {
  EXPECT_GE(openmp_parallel_for(0).threads, 1);
  for (int threads : {0, 1, 2, 5}) expect_each_task_once(openmp_parallel_for(threads));
}

}  // namespace
}  // namespace headroom
