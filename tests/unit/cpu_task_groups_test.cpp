#include "cpu/run/task_groups.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <random>
#include <thread>
#include <vector>

namespace logitless::cpu {
namespace {

// A pool with a thread for every task of a loop, all at once.
ParallelFor threads_for(int threads) {
  return {threads, [](int64_t tasks, LoopBody body) {
            std::vector<std::jthread> all;
            for (int64_t task = 0; task < tasks; ++task) all.emplace_back([=] { body(task, 0); });
          }};
}

ParallelFor reverse(int threads) {
  return {threads, [](int64_t tasks, LoopBody body) {
            for (int64_t task = tasks; task-- > 0;) body(task, 0);
          }};
}

// Groups whose tasks check that the groups before are done, and count themselves.
class Checked {
 public:
  explicit Checked(size_t groups) : memory_(groups), groups_(memory_), done_(groups) {}

  TaskGroups::Id add(int64_t tasks, std::initializer_list<TaskGroups::Id> after) {
    const size_t group = before_.size();
    before_.emplace_back();
    for (TaskGroups::Id id : after) {
      if (id != TaskGroups::kNone) before_.back().push_back(static_cast<size_t>(id));
    }
    sizes_.push_back(tasks);
    counts_.emplace_back(static_cast<size_t>(tasks), 0);
    return groups_.add(tasks, after, [this, group](int64_t task, int worker) { check(group, task, worker); });
  }
  // Keeps the task from ending before all tasks of group `until` have ended.
  void hold(size_t group, int64_t task, size_t until) {
    held_group_ = group;
    held_task_ = task;
    until_ = until;
  }
  void run(const ParallelFor& pool, int workers) {
    alarm(60);  // ends a test that hangs
    busy_ = std::vector<std::atomic<int>>(static_cast<size_t>(workers));
    groups_.run(pool, workers);
    alarm(0);
    EXPECT_EQ(wrong_, 0);
    for (const auto& group : counts_) {
      for (int count : group) EXPECT_EQ(count, 1);
    }
  }

 private:
  void check(size_t group, int64_t task, int worker) {
    if (busy_.at(static_cast<size_t>(worker))++ != 0) ++wrong_;
    for (size_t before : before_[group]) {
      if (done_[before] != sizes_[before]) ++wrong_;
      for (int count : counts_[before]) wrong_ += count != 1;  // plain memory: ThreadSanitizer sees the order
    }
    if (group == held_group_ && task == held_task_) {
      while (done_[until_] != sizes_[until_]) std::this_thread::yield();
    }
    ++counts_[group][static_cast<size_t>(task)];
    ++done_[group];
    --busy_[static_cast<size_t>(worker)];
  }

  std::vector<TaskGroup> memory_;
  TaskGroups groups_;
  std::vector<std::vector<size_t>> before_;
  std::vector<int64_t> sizes_;
  std::vector<std::vector<int>> counts_;
  std::deque<std::atomic<int64_t>> done_;
  std::vector<std::atomic<int>> busy_;
  std::atomic<int> wrong_{0};
  size_t held_group_ = ~size_t{0}, until_ = 0;
  int64_t held_task_ = 0;
};

TEST(TaskGroups, RandomGraphsOnAnyPool) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 60; ++repeat) {
    for (const ParallelFor& pool : {threads_for(4), serial_parallel_for(), reverse(4)}) {
      const size_t size = 1 + random() % 40;
      Checked groups(size);
      std::vector<TaskGroups::Id> ids{TaskGroups::kNone};
      const auto any = [&] { return ids[random() % ids.size()]; };
      for (size_t i = 0; i < size; ++i)
        ids.push_back(groups.add(1 + random() % 9, {any(), any(), ids.back()}));
      groups.run(pool, 4);
    }
  }
}

TEST(TaskGroups, NoneAndEmptyGroups) {
  Checked none(0);
  none.run(threads_for(3), 3);
  Checked groups(1);
  EXPECT_EQ(groups.add(0, {}), TaskGroups::kNone);
  EXPECT_EQ(groups.add(2, {TaskGroups::kNone}), 0);
}

// A pipeline like that of the gradients. A late task of the third window holds up what comes after it, while
// the other worker runs the first half of each later window. With a barrier anywhere, the late task would
// wait for ever.
TEST(TaskGroups, ALateTaskHoldsUpOnlyWhatDependsOnIt) {
  constexpr int kWindows = 20;
  for (int workers : {2, 3, 7}) {
    Checked groups(2 * kWindows);
    TaskGroups::Id sums = TaskGroups::kNone;
    TaskGroups::Id made = TaskGroups::kNone;
    for (int w = 0; w < kWindows; ++w) {
      made = groups.add(3, {});
      sums = groups.add(4, {made, sums});
    }
    groups.hold(2 * 2 + 1, 1, static_cast<size_t>(made));
    groups.run(threads_for(workers), workers);
  }
}

// Workers that find nothing ready sleep, and are woken.
TEST(TaskGroups, AChainOfSingleTasks) {
  constexpr int kLength = 500;
  Checked groups(kLength);
  TaskGroups::Id last = TaskGroups::kNone;
  for (int i = 0; i < kLength; ++i) last = groups.add(1, {last});
  groups.run(threads_for(4), 4);
}

}  // namespace
}  // namespace logitless::cpu
