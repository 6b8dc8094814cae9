#include "cpu/run/task_groups.h"

#include <algorithm>
#include <memory>

#include "core/status.h"

namespace logitless::cpu {

TaskGroups::Id TaskGroups::add(int64_t tasks, std::initializer_list<Id> after, TaskBody body) {
  if (tasks == 0) return kNone;
  if (static_cast<size_t>(count_) >= groups_.size() || after.size() > TaskGroup::kMostBefore) {
    throw Error(Status::kInternal, "more groups of tasks than were planned");
  }
  TaskGroup& group = *std::construct_at(&groups_[static_cast<size_t>(count_)]);
  group.body = body;
  group.tasks = tasks;
  std::fill(std::begin(group.after), std::end(group.after), kNone);
  std::copy(after.begin(), after.end(), group.after);
  group.left.store(tasks, std::memory_order_relaxed);  // the pool publishes it
  return count_++;
}

void TaskGroups::run(const ParallelFor& parallel_for, int workers) {
  if (count_ == 0) return;
  if (workers == 1) return work(0);
  parallel_for(workers, [this](int64_t worker, int) { work(static_cast<int>(worker)); });
}

// Acquires what the tasks of the groups before have written.
bool TaskGroups::is_ready(const TaskGroup& group) const {
  return std::all_of(std::begin(group.after), std::end(group.after), [&](Id before) {
    return before == kNone || groups_[static_cast<size_t>(before)].left.load(std::memory_order_acquire) == 0;
  });
}

TaskGroups::Claim TaskGroups::claim() {
  Claim claim;
  claim.all_claimed = true;
  const Id first = first_.load(std::memory_order_relaxed);
  for (Id id = first; id < count_; ++id) {
    TaskGroup& group = groups_[static_cast<size_t>(id)];
    if (group.next.load(std::memory_order_relaxed) >= group.tasks) {
      if (claim.all_claimed) first_.store(id + 1, std::memory_order_relaxed);  // a hint: may go back
      continue;
    }
    if (is_ready(group)) {
      claim.task = group.next.fetch_add(1, std::memory_order_relaxed);
      if (claim.task < group.tasks) {
        claim.group = &group;
        return claim;
      }
      continue;
    }
    claim.all_claimed = false;
  }
  return claim;
}

void TaskGroups::work(int worker) {
  for (;;) {
    // Read before the search: a group that ends during it changes the number, and wait() returns at once.
    const uint32_t seen = finished_.load(std::memory_order_acquire);
    const Claim claimed = claim();
    if (claimed.group == nullptr) {
      if (claimed.all_claimed) return;
      finished_.wait(seen, std::memory_order_acquire);
      continue;
    }
    TaskGroup& group = *claimed.group;
    group.body(claimed.task, worker);
    // Releases this task. The last task acquires the others, so that whoever sees 0 sees all.
    if (group.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      finished_.fetch_add(1, std::memory_order_release);
      finished_.notify_all();
    }
  }
}

}  // namespace logitless::cpu
