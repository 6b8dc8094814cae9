#include "grid.h"

#include <algorithm>
#include <array>
#include <barrier>
#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

// The language's variables, for the fiber that runs.
LOGITLESS_INITIAL_EXEC thread_local uint3 threadIdx;
LOGITLESS_INITIAL_EXEC thread_local uint3 blockIdx;
LOGITLESS_INITIAL_EXEC thread_local dim3 blockDim;
LOGITLESS_INITIAL_EXEC thread_local dim3 gridDim;

namespace cuda_on_cpu {
namespace {

namespace context = boost::context;

constexpr size_t kStackBytes = size_t{64} << 10;
constexpr unsigned kWarp = 32;

// Reuses stacks while their thread of the system lives: fresh memory would be most of a block's time.
class Stacks {
 public:
  context::stack_context allocate() {
    if (free_.stacks.empty()) return context::fixedsize_stack(kStackBytes).allocate();
    const context::stack_context stack = free_.stacks.back();
    free_.stacks.pop_back();
    return stack;
  }
  void deallocate(context::stack_context& stack) noexcept { free_.stacks.push_back(stack); }

 private:
  struct Free {
    std::vector<context::stack_context> stacks;
    ~Free() {
      for (context::stack_context& stack : stacks) context::fixedsize_stack(kStackBytes).deallocate(stack);
    }
  };
  static thread_local Free free_;
};
thread_local Stacks::Free Stacks::free_;

// Lanes that exchange values. These lie in one of two places in turn, because no lane can be more than one
// exchange ahead of another.
struct Group {
  unsigned mask;
  unsigned arrived = 0;
  uint64_t generation = 0;
  std::array<Lanes, 2> lanes{};
};

struct Warp {
  std::vector<std::unique_ptr<Group>> groups;  // one for each mask
  unsigned sleeps = 0;                         // turns that it lets pass
};

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
};

struct Thread {
  uint3 index{};
  unsigned number = 0;
  size_t any_calls = 0;
  std::vector<std::vector<Copy>> copies;  // groups that are not done; the last one is open
  bool has_ended = false;
  const uint64_t* awaited = nullptr;  // a count that the thread waits for, while it is this
  uint64_t count = 0;
  context::fiber fiber;
};

class Block {
 public:
  Block(const Grid& grid, uint3 index, const std::function<void()>& body, std::barrier<>* others)
      : grid_(grid), index_(index), body_(body), others_(others) {
    count_ = grid.threads.x * grid.threads.y * grid.threads.z;
    warps_.resize((count_ + kWarp - 1) / kWarp);
    // Aligned as device memory is, and not 0 at first.
    shared_.assign(grid.shared_bytes / sizeof(uint64_t) + 2, 0xffffffffffffffff);
  }

  void run() {
    current = this;
    blockIdx = index_;
    blockDim = grid_.threads;
    gridDim = grid_.blocks;
    begin_all();
    while (ended_ < count_) {
      uint64_t before = progress_;
      resume_some();
      if (progress_ != before) continue;
      for (Thread& thread : threads_) resume(thread);
      if (progress_ == before) fail("threads wait for others that never come to the same barrier");
    }
    current = nullptr;
  }

  void wait() {
    const uint64_t generation = generation_;
    ++arrived_;
    release_block();
    wait_while(generation_, generation);
  }

  int any(int value) {
    const size_t call = running_->any_calls++;
    if (value != 0) any_[call % 3] = 1;
    any_[(call + 1) % 3] = 0;  // its last readers have come to this call
    wait();
    return any_[call % 3];
  }

  void wait_for_named(int barrier, unsigned threads) {
    if (barrier < 0 || barrier >= 16) fail("there are 16 barriers");
    Named& named = named_[barrier];
    const uint64_t generation = named.generation;
    ++progress_;
    if (++named.arrived == threads) {
      named.arrived = 0;
      ++named.generation;
    }
    wait_while(named.generation, generation);
  }

  const Lanes& exchange(unsigned mask, uint64_t mine, const uint32_t* words = nullptr, size_t count = 0) {
    Group& group = group_of(mask);
    const unsigned lane = running_->number % kWarp;
    if ((mask >> lane & 1) == 0) fail("a lane is not in its own mask");
    const uint64_t generation = group.generation;
    Lanes& lanes = group.lanes[generation % 2];
    lanes.value[lane] = mine;
    std::copy_n(words, count, lanes.words[lane]);
    ++progress_;
    if (++group.arrived == static_cast<unsigned>(__builtin_popcount(mask))) {
      group.arrived = 0;
      ++group.generation;
    }
    wait_while(group.generation, generation);
    return lanes;
  }

  void wait_for_others() {
    if (others_ == nullptr) fail("a grid barrier in a launch that is not cooperative");
    wait();
    if (running_->number == 0) others_->arrive_and_wait();
    wait();
  }

  unsigned number() const { return running_->number; }
  void* shared() {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(shared_.data()) + 15) / 16 * 16);
  }
  void* shared_at(uint32_t offset, size_t bytes) {
    if (size_t{offset} + bytes > grid_.shared_bytes) fail("shared memory past its end");
    if (offset % std::min<size_t>(bytes, 16) != 0) fail("shared memory that is not aligned");
    return static_cast<char*>(shared()) + offset;
  }

  void copy_async(const Copy& copy) {
    if (copy.bytes < 0 || copy.bytes > 16 || reinterpret_cast<uintptr_t>(copy.from) % 16 != 0) {
      fail("a copy to shared memory that no device takes");
    }
    shared_at(copy.to, 16);
    if (next_random() % 2 != 0) {
      if (running_->copies.empty()) running_->copies.emplace_back();
      running_->copies.back().push_back(copy);
    } else {
      finish(copy);
    }
  }
  void copy_async_commit() {
    if (!running_->copies.empty()) running_->copies.emplace_back();
  }
  void copy_async_wait(size_t pending) {
    std::vector<std::vector<Copy>>& groups = running_->copies;
    for (; groups.size() > pending + 1; groups.erase(groups.begin())) {
      for (const Copy& copy : groups.front()) finish(copy);
    }
  }

  const char* kernel() const { return grid_.kernel; }

  static thread_local Block* current LOGITLESS_INITIAL_EXEC;

 private:
  struct Named {
    unsigned arrived = 0;
    uint64_t generation = 0;
  };

  void finish(const Copy& copy) {
    auto* to = static_cast<char*>(shared_at(copy.to, 16));
    std::memset(to, 0, 16);
    std::memcpy(to, copy.from, static_cast<size_t>(copy.bytes));
  }

  void begin_all() {
    threads_.resize(count_);
    unsigned number = 0;
    for (unsigned z = 0; z < grid_.threads.z; ++z) {
      for (unsigned y = 0; y < grid_.threads.y; ++y) {
        for (unsigned x = 0; x < grid_.threads.x; ++x) {
          Thread& thread = threads_[number];
          thread.index = {x, y, z};
          thread.number = number++;
          thread.fiber =
              context::fiber(std::allocator_arg, Stacks(), [this, &thread](context::fiber&& caller) {
                caller_ = std::move(caller);
                body_();
                thread.has_ended = true;
                ++ended_;
                ++progress_;
                release_block();
                return std::move(caller_);
              });
        }
      }
    }
  }

  // Resumes all warps but those that sleep, some of them for long. So warps are ahead of each other as far as
  // barriers let them, as on a device.
  void resume_some() {
    if (warps_.size() == 1) return;
    for (unsigned warp = 0; warp < warps_.size(); ++warp) {
      unsigned& sleeps = warps_[warp].sleeps;
      if (sleeps == 0 && next_random() % 32 == 0) sleeps = next_random() % 128;
      if (sleeps > 0) {
        --sleeps;
        continue;
      }
      const unsigned end = std::min(count_, (warp + 1) * kWarp);
      for (unsigned i = warp * kWarp; i < end; ++i) resume(threads_[i]);
    }
  }

  uint64_t next_random() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return random_ >> 33;
  }

  void resume(Thread& thread) {
    if (thread.has_ended || (thread.awaited != nullptr && *thread.awaited == thread.count)) return;
    thread.awaited = nullptr;
    running_ = &thread;
    threadIdx = thread.index;
    thread.fiber = std::move(thread.fiber).resume();
  }

  void wait_while(const uint64_t& awaited, uint64_t count) {
    if (awaited != count) return;
    running_->awaited = &awaited;
    running_->count = count;
    caller_ = std::move(caller_).resume();
  }

  void release_block() {
    ++progress_;
    if (arrived_ > 0 && arrived_ + ended_ == count_) {
      arrived_ = 0;
      ++generation_;
    }
  }

  Group& group_of(unsigned mask) {
    Warp& warp = warps_[running_->number / kWarp];
    for (const auto& group : warp.groups) {
      if (group->mask == mask) return *group;
    }
    warp.groups.push_back(std::make_unique<Group>(Group{.mask = mask}));
    return *warp.groups.back();
  }

  const Grid& grid_;
  uint3 index_;
  const std::function<void()>& body_;
  std::barrier<>* others_;
  unsigned count_ = 0, ended_ = 0, arrived_ = 0;
  uint64_t generation_ = 0, progress_ = 0;
  std::array<int, 3> any_{};
  std::array<Named, 16> named_{};
  uint64_t random_ = 1;
  std::vector<Warp> warps_;
  std::vector<uint64_t> shared_;
  std::vector<Thread> threads_;
  Thread* running_ = nullptr;
  context::fiber caller_;
};

thread_local Block* Block::current = nullptr;

Block& here() {
  if (Block::current == nullptr) fail("device code was called outside of a kernel");
  return *Block::current;
}

}  // namespace

void run(const Grid& grid, const std::function<void()>& body) {
  std::optional<std::barrier<>> all;
  std::vector<std::thread> system_threads;
  if (grid.is_cooperative) all.emplace(static_cast<std::ptrdiff_t>(grid.blocks.x));
  for (unsigned z = 0; z < grid.blocks.z; ++z) {
    for (unsigned y = 0; y < grid.blocks.y; ++y) {
      for (unsigned x = 0; x < grid.blocks.x; ++x) {
        const uint3 index{x, y, z};
        const auto one = [&grid, &body, &all, index] {
          Block(grid, index, body, all ? &*all : nullptr).run();
        };
        if (grid.is_cooperative) {
          system_threads.emplace_back(one);
        } else {
          one();
        }
      }
    }
  }
  for (std::thread& thread : system_threads) thread.join();
}

void wait_for_block() {
  here().wait();
}
int any_of_block(int value) {
  return here().any(value);
}
void wait_for_named(int barrier, unsigned threads) {
  here().wait_for_named(barrier, threads);
}
void wait_for_grid() {
  here().wait_for_others();
}
void* dynamic_shared_memory() {
  return here().shared();
}
void* shared_at(uint32_t offset, size_t bytes) {
  return here().shared_at(offset, bytes);
}
const Lanes& exchange(unsigned mask, uint64_t mine) {
  return here().exchange(mask, mine);
}
const Lanes& exchange_words(const uint32_t* mine, size_t count) {
  return here().exchange(~0u, 0, mine, count);
}
void copy_async(uint32_t to, const void* from, int bytes) {
  here().copy_async({to, from, bytes});
}
void copy_async_commit() {
  here().copy_async_commit();
}
void copy_async_wait(size_t pending) {
  here().copy_async_wait(pending);
}
int lane_of_warp() {
  return static_cast<int>(here().number() % kWarp);
}

void fail(const char* what) {
  const char* kernel = Block::current == nullptr ? "" : Block::current->kernel();
  std::fprintf(stderr, "CUDA on the CPU: %s: %s\n", kernel, what);
  std::abort();
}

}  // namespace cuda_on_cpu
