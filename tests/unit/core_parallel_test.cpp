#include "core/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "api/run.h"

namespace logitless {
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

// After a fork, the child runs the tasks on threads of its own.
TEST(ParallelFor, OpenMPRunsEachTaskOnceInAForkedProcess) {
  const ParallelFor parallel_for = openmp_parallel_for(4);
  expect_each_task_once(parallel_for);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // ends a child that hangs
    expect_each_task_once(parallel_for);
    expect_each_task_once(openmp_parallel_for(2));
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  expect_each_task_once(parallel_for);
}

}  // namespace
}  // namespace logitless
