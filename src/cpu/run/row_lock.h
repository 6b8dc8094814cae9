#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

namespace logitless::cpu {

// Blocks that share a row meet rarely, and hold it for some hundred elements. The flag is 0 while nobody has
// it.
class RowLock {
 public:
  explicit RowLock(int32_t& flag) : flag_(flag) {
    while (flag_.exchange(1, std::memory_order_acquire) != 0) std::this_thread::yield();
  }
  ~RowLock() { flag_.store(0, std::memory_order_release); }
  RowLock(const RowLock&) = delete;
  RowLock& operator=(const RowLock&) = delete;

 private:
  std::atomic_ref<int32_t> flag_;
};

}  // namespace logitless::cpu
