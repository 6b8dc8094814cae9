#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <span>
#include <type_traits>

#include "core/parallel.h"

namespace logitless::cpu {

// A function of (task, worker), copied from a lambda that captures at most two references or numbers, so that
// nothing is allocated. Captured references must outlive the loop.
class TaskBody {
 public:
  TaskBody() = default;
  template <class F>
    requires(!std::is_same_v<F, TaskBody>)
  TaskBody(const F& body)  // NOLINT(google-explicit-constructor): groups are made with lambdas
      : call_([](const std::byte* f, int64_t task, int worker) {
          (*std::launder(reinterpret_cast<const F*>(f)))(task, worker);
        }) {
    static_assert(sizeof(F) <= sizeof(body_) && std::is_trivially_copyable_v<F>);
    ::new (static_cast<void*>(body_)) F(body);
  }
  void operator()(int64_t task, int worker) const { call_(body_, task, worker); }

 private:
  alignas(int64_t) std::byte body_[2 * sizeof(int64_t)];
  void (*call_)(const std::byte* body, int64_t task, int worker) = nullptr;
};

// Tasks that may run at once, after all tasks of some groups before. Each group has a cache line of its own.
// The size is the same on every machine because plans count it.
struct alignas(64) TaskGroup {
  static constexpr int kMostBefore = 4;
  TaskBody body;
  int64_t tasks = 0;
  int32_t after[kMostBefore];
  std::atomic<int64_t> next{0};  // the first task that nobody has claimed
  std::atomic<int64_t> left{0};  // tasks that are not done
};

// Runs groups of tasks in one loop of the pool, without barriers.
// A worker takes the first task whose groups before are done, in the order in which groups were added. So a
// late worker delays only what depends on the task that it holds. A worker waits, asleep, only while every
// unclaimed task depends on one that another worker is running. It returns when all tasks are claimed.
// One worker alone, whichever the pool starts first, never waits and runs everything, because a group only
// comes after groups that were added before.
class TaskGroups {
 public:
  using Id = int32_t;
  static constexpr Id kNone = -1;

  explicit TaskGroups(std::span<TaskGroup> memory) : groups_(memory) {}
  TaskGroups(const TaskGroups&) = delete;
  TaskGroups& operator=(const TaskGroups&) = delete;

  // Adds a group. A group without tasks is not added and counts as done; so does kNone in `after`.
  Id add(int64_t tasks, std::initializer_list<Id> after, TaskBody body);

  // Runs all groups; to be called once. `workers` tasks of the pool run the bodies. The bodies' workers are
  // the numbers of these tasks, not the pool's own.
  void run(const ParallelFor& parallel_for, int workers);

 private:
  struct Claim {
    TaskGroup* group = nullptr;  // null: nothing to do now
    int64_t task = 0;
    bool all_claimed = false;
  };
  void work(int worker);
  Claim claim();
  bool is_ready(const TaskGroup& group) const;

  std::span<TaskGroup> groups_;
  Id count_ = 0;
  std::atomic<Id> first_{0};           // every task of the groups before is claimed
  std::atomic<uint32_t> finished_{0};  // groups that are done; waiting workers wait for a change
};

}  // namespace logitless::cpu
